"""Text as it comes, token by token: what is shown, held back and cut is known from the tokens so far alone."""

import random

import pytest
from test_walk_engine import PIECES, save_tokenizer
from transformers import AutoTokenizer

from nanoengine.text import OutputText


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def feed(text, letters):
    for letter in letters:
        text.append(PIECES.index(letter))
    return text.text, text.is_stopped


def test_the_longest_beginning_of_a_stop_string_is_held_back(tokenizer):
    assert feed(text := OutputText(tokenizer, ("aab",)), "ca") == ("c", False)
    assert feed(text, "a") == ("c", False)      # not only the last a
    assert feed(text, "a") == ("ca", False)
    assert feed(text, "b") == ("ca", True)
    assert feed(text := OutputText(tokenizer, ("abc", "bd")), "ab") == ("", False)
    assert feed(text, "d") == ("a", True)


def test_the_first_match_cuts_and_nothing_follows(tokenizer):
    assert feed(text := OutputText(tokenizer, ("cab", "a")), "ec") == ("e", False)
    assert feed(text, ["ab"]) == ("e", True)    # both in one token: the one that begins first
    assert feed(text, "ddd") == ("e", True)
    text.flush([6, 4, 17, 5, 5, 5])
    assert text.text == "e"


def test_what_is_shown_follows_from_what_came_whatever_the_tokens_and_stop_strings(tokenizer):
    """Against the definition, on texts of a, b and their joins, where beginnings of stop strings overlap."""
    rng, num_stopped = random.Random(3), 0
    for _ in range(1500):
        stops = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3)))
        text, token_ids = OutputText(tokenizer, stops), []
        for _ in range(12):
            token_ids.append(PIECES.index(rng.choice(["a", "b", "ab", "ba", "a", "c", "Ã", "©"])))
            text.append(token_ids[-1])
            whole = tokenizer.decode(token_ids)
            shown = whole.rstrip("\ufffd")
            if any(stop in shown for stop in stops):
                assert (text.text, text.is_stopped) == (shown[:min(shown.find(s) for s in stops if s in shown)], True)
                break
            held = max((n for s in stops for n in range(1, len(s)) if shown.endswith(s[:n])), default=0)
            if whole == shown:                  # else half a character is held back too
                assert (text.text, text.is_stopped) == (shown[:len(shown) - held], False)
        num_stopped += text.is_stopped
        text.flush(token_ids)
        if not text.is_stopped:
            assert text.text == shown
    assert 300 < num_stopped < 1300


def test_bytes_that_turn_out_to_be_no_character_end_nothing():
    """Byte-fallback tokenizers (Llama 2): a newline is a byte token; half an emoji and a word behind it are no text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from nanoengine.text import OutputText

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}, "▁the": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    output = OutputText(PreTrainedTokenizerFast(tokenizer_object=tokenizer), ())
    ids = [13, 3 + 0xF0, 3 + 0x9F, 259, 259]
    for token_id in ids:
        output.append(token_id)
    output.flush(ids)
    assert output.text.startswith("\n") and output.text.endswith(" the the")
