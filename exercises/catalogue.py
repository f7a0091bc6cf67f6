"""What can be written again: functions of the engine, and the tests that tell whether it was written well."""
from collections import namedtuple

# functions: by file in nanoengine/. tests: pytest's names in tests/, the easiest first. Handout: exercises/NAME.md.
Exercise = namedtuple("Exercise", "name title needs functions tests")

def some(file: str, *names: str) -> list[str]:
    return [f"test_{file}.py::test_{name}" for name in names]

PYTHON, CPU, TWO = "plain Python, tested up to a tiny model", "torch on a CPU", "torch on a CPU, several processes"

EXERCISES = [
    Exercise("blocks", "Who owns which block of the KV cache", PYTHON,
             {"block_manager.py": ["BlockManager.num_blocks_for", "BlockManager.allocate", "BlockManager.free"]},
             ["test_block_manager.py", "test_walk_scheduler.py",
              *some("ladder", "a_pool_in_any_order", "every_block_size")]),
    Exercise("prefix-cache", "Blocks that are found again by what they hold", PYTHON,
             {"block_manager.py": [f"BlockManager.{name}" for name in ("find_prefix", "register", "_look_up", "_key")]},
             ["test_block_manager.py", "test_walk_scheduler.py", *some(
                 "ladder", "a_prompt_of_whole_blocks_still_computes_a_token",
                 "no_hit_on_blocks_that_are_not_written_yet", "an_answer_is_a_prefix_of_the_next_prompt")]),
    Exercise("scheduler", "Who computes how many tokens next", PYTHON,
             {"scheduler.py": [f"Scheduler.{name}" for name in ("schedule", "update", "finish")]},
             ["test_scheduler.py", "test_walk_scheduler.py", *some(
                 "ladder", "the_budget_fits_one_prompt_and_part_of_the_second", "twins_preempt_each_other",
                 "the_oldest_request_gets_a_token_in_every_step")]),
    Exercise("step-input", "A step as flat arrays", PYTHON, {"step_input.py": ["StepInput.from_chunks", "flatten"]},
             ["test_step_input.py", "test_walk_scheduler.py", *some("ladder", "hit_and_cold_prompts_in_one_step")]),
    Exercise("sampler", "From logits to a token", CPU,
             {"kernels.py": ["gumbel_noise"],
              "sampler.py": ["pack_rules", "apply_rules", "penalise", "filter_logits", "top_logprobs"]},
             [*some("kernels", "noise_at_the_ends_of_its_range_is_finite", "noise_is_standard_gumbel"),
              *some("sampling", "what_the_filters_keep", "ties_go_to_the_lower_ids", "each_row_has_its_own_filters",
                    "repetition_divides_positive_and_multiplies_negative_logits_of_what_occurred",
                    "all_three_penalties_repetition_first", "each_row_has_its_own_penalties_and_history",
                    "packed_rules_are_a_table", "a_bias_is_added_to_its_own_row_and_token",
                    "a_rule_holds_from_start_to_before_end", "a_prefix_is_what_stands_right_before",
                    "the_drawn_token_first_then_the_likeliest", "every_wish_in_one_batch_equals_the_oracle"),
              *some("ladder", "seeded_draws_equal_the_oracle")]),
    Exercise("paged-attention", "Attention through block tables", CPU, {"attention.py": ["plain_attention"]},
             ["test_attention.py", *some("kernels", "plain_attention_is_that_of_torch"),
              *some("models", "greedy_tokens_equal_transformers"),
              *some("ladder", "everything_scarce_at_once", "a_pool_in_any_order")]),
    Exercise("decoder", "Rotary embedding, and a decoder's layers", CPU,
             {"decoder.py": ["rotary_table", "Attention.forward", "DecoderLayer.forward", "Decoder.forward"],
              "kernels.py": ["rope_and_store"]},
             ["test_rope.py", *some("models", "logits_equal_transformers", "one_kv_head_per_head_and_one_for_all",
                                    "one_early_prompt_token_changes_the_output", "greedy_tokens_equal_transformers")]),
    Exercise("tensor-parallel", "Layers split over ranks", TWO,
             {"linear.py": ["Linear.forward", "Linear.sources", "VocabParallelEmbedding.forward"],
              "decoder.py": ["RMSNorm.forward"]},
             ["test_linear.py", *some("models", "logits_equal_transformers"),
              *some("ranks", "greedy_tokens_equal_one_ranks")]),
    Exercise("asynchrony", "The next step before the last one's result", CPU,
             {"llm_engine.py": ["LLMEngine._advance", "LLMEngine._launch", "LLMEngine._take_in"]},
             ["test_async.py", *some("ladder", "everything_scarce_at_once", "no_token_is_computed_that_nobody_needs"),
              *some("requests", "a_stop_tokens_text_does_not_show", "stop_strings", "abort_in_every_state",
                    "an_aborted_id_used_again_is_a_new_request", "ctrl_c_at_any_line_of_generate")]),
    Exercise("rpc", "Calls to other processes, and what if one dies", TWO,
             {"rpc.py": ["Channel.send", "Channel.receive", "Ranks.call", "serve"]},
             some("rpc", "nobody_waits_when_everybody_has_read", "a_message_larger_than_the_segment",
                  "any_size_of_the_segment", "what_somebody_still_reads_is_not_overwritten", "a_lost_part_is_noticed",
                  "ten_thousand_messages_arrive_whole_and_in_order", "close_leaves_nothing",
                  "a_peer_raises_in_the_third_step", "a_killed_peer_is_noticed_between_two_steps",
                  "a_killed_peer_is_noticed_in_the_middle_of_a_message")),
    Exercise("cuda-graphs", "A decode step with one call", "a GPU; without one the first file runs on stand-ins",
             {"cuda_graph.py": ["batch_sizes", "CudaGraphs.__init__", "CudaGraphs.replay"]},
             ["test_cuda_graph.py", *some("gpu", "graph_equals_eager_for_every_batch_size", "kernels_and_graphs",
                                          "padding_touches_nothing_that_lives")]),
]
