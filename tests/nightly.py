"""Tests that `make test` leaves out, so that it ends in minutes: marked slow here, and run by `make test-nightly`.

What stays of each kind in the tests of every change is named beside it.
"""

from __future__ import annotations

import re
from pathlib import Path


TESTS = Path(__file__).parent

FILES = (
    # Whole programs, products over features, families and the self-test: of each kind tests/trainer and
    # tests/distributed/test_equality.py have some.
    "conformance/test_conformance.py",
    "conformance/test_swap.py",
    "distributed/test_every_family.py",
    "distributed/test_nodes.py",
    "distributed/test_own_models.py",
    "distributed/test_real_input.py",
    "distributed/test_replicas.py",
    "distributed/test_selftest.py",
    "scripts/test_augmentation.py",
    "scripts/test_bench.py",
    "scripts/test_notebook.py",
    "scripts/test_qa.py",
    "scripts/test_scripts.py",
    # On one process tests/trainer, tests/splitters and tests/data have the same.
    "distributed/test_adapters_in_stages.py",
    "distributed/test_afterwards.py",
    "distributed/test_async.py",
    "distributed/test_decoders.py",
    "distributed/test_draws.py",
    "distributed/test_flattened.py",
    "distributed/test_generation.py",
    "distributed/test_fp16.py",
    "distributed/test_precision_in_stages.py",
    "distributed/test_hosts.py",
    "distributed/test_loaders.py",
    "distributed/test_logged.py",
    "distributed/test_node_cache.py",
    "distributed/test_preferences.py",
    "distributed/test_sft.py",
    "distributed/test_synchronisation.py",
    # Other models and checkpoints than those of test_families.py and test_going_on.py.
    "splitters/test_experts.py",
    "splitters/test_own_models.py",
    "splitters/test_quantized.py",
    "splitters/test_uncommon.py",
    "state/test_trainers_checkpoints.py",
    # Whole plans: test_planning.py has their parts.
    "engine/test_modes.py",
    "startup/test_run_plan.py",
)

_EQUALITY_2X1 = "xlm_roberta|distilbert|electra|mpnet|deberta|modernbert|dinov2|beit|siglip|ast-|roberta|deit|SHORT"
_KEPT_USAGES = "BERT|a frozen parameter|a stream|metrics by batches|a callback that changes the model"

CASES = tuple(
    re.compile(pattern)
    for pattern in (
        # One family of each kind of head stays.
        rf"distributed/test_equality\.py::.*\[2x1-({_EQUALITY_2X1})",
        r"distributed/test_equality\.py::.*\[(1x2|2x2)-(mpnet|bert_token|best)",
        r"distributed/test_equality\.py::.*\[1x1-(M-|compute)",
        r"distributed/test_equality\.py::.*\[1x2-(last-batch-without|data-of-one|compute_loss_func\]|load_best)",
        r"distributed/test_equality\.py::.*\[2x1-(bert_token|bert_sequence-eager|M-|data-shorter|pipeline_checkpoint-except"
        r"|answers|loss-not-a-number\]|vit-zb_h1)",
        r"distributed/test_equality\.py::.*\[2x2-(vit-1f1b|last-batch|load_best|bert_masked-interleaved)",
        r"distributed/test_equality\.py::.*\[4x1-(deberta|M-|pipeline_checkpoint)",
        # Of each kind of transition one stays.
        r"distributed/test_transition(s|_laws)\.py::.*\[((single|plain)-)?(tied-embedding-in-a-v|interleaved"
        r"|cached-below-frozen|cached-not-elastic|adamw-vit|all-at-once|loader-workers|compiled-layers|not-elastic"
        r"|fruitless|custom-policy|search-cut-short|cached-adamw-vit|cached-tokens|cached-recomputed"
        r"|cached-loader-workers|cached-own-plans|best-model|user-froze|sgd-bert|schedule|users-optimizer"
        r"|cached-answers|tied-embedding-moves|own-plans)",
        # A checkpoint of each layout is gone on with, and a draw from the middle of an epoch.
        r"distributed/test_resume\.py::.*\[(1x1-(sgd|norms|plateau)|2x1-(tied|norms|memory)|1x2-by-length|2x2-"
        r"|4-2-1-mid-epoch)",
        r"distributed/test_cache\.py::test_(weights_change_after_the_fetch_of_images|weights_change_within_an_accumulation"
        r"|kept_without_a_name|two_runs_at_a_time_have_a_store_each\[1|frozen_by_the_user_and_cut_anew|one_epoch_left)",
        r"distributed/test_behaviour\.py::test_(outputs_of_any_shape\S*\[(False|True-ig)"
        r"|every_rank_learns_why_metrics_failed\[(raises|returns)|predicting_without_labels|replicas_pad_alike)",
        r"distributed/test_(failure|launcher)\.py::test_(a_wrong_option_is_in_the_box|accelerate_launch_is_killed)",
        r"distributed/test_faults\.py::test_(accelerate_that_starts_one_process|an_exception_on_rank_0_is_the_first_cause"
        r"|a_rank_killed_in_mid_step\S*first|a_rank_out_of_memory\S*unnoticed|an_exception_elsewhere\S*\[(log|save))",
        r"distributed/test_saving\.py::test_(a_rank_holds_what_its_layout_says\[K=4|recomputation_keeps_less\S*gpipe)",
        # Of the ways in which Trainer is used those that differ most stay.
        rf"trainer/test_left_to_trainer\.py::test_one_process\S*\[(?!({_KEPT_USAGES})\])",
        r"trainer/test_left_to_trainer\.py::test_what_was_left_to_trainer_is_gone_on_with",
        r"trainer/test_left_to_trainer\.py::test_what_a_model_raises\S*\[on parts",
        r"trainer/test_preferences\.py::test_\S*\[DPO",
        r"trainer/test_trl\.py::test_(what_is_computed_again|one_packed_row)",
        r"data/test_loaders\.py::test_no_sample_of_a_stream_is_lost\S*\[stages-(in |wrapping|piped)",
        r"data/test_loaders\.py::test_who_reads_a_batch\S*\[stream",
        r"splitters/test_adapters\.py::test_adapters_of_a_checkpoint\S*True",
        r"trainer/test_mixin\.py::test_(a_trainer_of_the_past|losses_that_trainer_averages)",
        r"state/test_going_on\.py::test_(a_training_that_failed\S*True|an_evaluation_within\S*True|another_policy"
        r"|a_resumed_run_that_lost_its_cache\S*no |a_run_that_replays|a_resumed_run_adds_gradients)",
        r"engine/test_token_slices\.py::test_every_table_of_slices_ends\[(16|5)-8",
        r"startup/test_losses\.py::test_a_model_whose_weights_are_nan",
        # Models of each kind of part, and of each kind of page.
        r"training/test_computed_once\.py::test_(what_is_frozen\S*\[(paligemma|vision encoder|detr|clip|t5|qwen|llava)"
        r"|a_probe_stores\S*\[(bert|dinov2|wav2vec2)|numbers_are_trainers\S*\[{'(grad|per)|a_resumed_run_goes_on"
        r"|an_image_classifier_that|evaluations_read\S*llava|adapters_in_a_tower\S*names)",
        r"project/test_code_blocks\.py::\S*(large_model|long_context|imagenet|cluster|prefix|how_it_works)",
        r"splitters/test_adapters\.py::test_a_model_that_was_dequantized",
        # One process, or one case of the kind, shows the same.
        r"distributed/test_equality\.py::.*\[(1x1|1x2-(label|compute|vit)|2x1-(predict|pipeline_checkpoint|labels)"
        r"|2x2-(label|compute_loss|vit)|4x1-bert_masked-1f1b)",
        r"distributed/test_cache\.py::test_(?!weights_change_behind|kept_for_another|samples_change)",
        r"distributed/test_resume\.py::.*\[(1x1|2x1-(weights|stream)|1x2)",
        r"distributed/test_resume\.py::test_(a_run_goes_on_with_other|a_policy_that_remembers|what_is_left_of_an_epoch"
        r"|a_run_of_plain_trainer|what_is_exported_from_two|other_settings_are_said"
        r"|every_other_resume|true_means_the_newest|a_newest_checkpoint"
        r"|nothing_is_exported)",
        r"distributed/test_failure\.py::test_a_killed_rank_is_named",
        r"distributed/test_launcher\.py::test_(ranks_end_with_the_process|the_others_get_a_grace_period)",
        r"distributed/test_plan_only\.py::test_(every_rank_ends\S*options1|one_process_prints)",
        r"distributed/test_decisions\.py::test_(a_seeded_run_with_dropout|all_ranks_try)",
        r"distributed/test_transition_faults\.py::test_(a_layout_that_ran_out|a_rank_with_another_layout)",
        r"distributed/test_transition_laws\.py::test_(the_samples_of_every_step|\S*gradient-norms)",
        r"distributed/test_transition(s|_laws)\.py::.*\[((single|plain)-)?(gradient-norms|stream-own)",
        r"distributed/test_behaviour\.py::test_(rank_0_alone|logits_are_preprocessed|of_a_loss_only|a_loss_that_reads"
        r"|a_trainer_of_somebody)",
        r"distributed/test_faults\.py::test_(a_rank_that_falls_silent|a_rank_lost_on_another_node"
        r"|a_worker_of_a_loader|a_sound_run|a_rank_out_of"
        r"|processes_without_gpus|an_exception_elsewhere\S*callback|an_exception_in_compute_loss\S*first)",
        r"distributed/test_saving\.py::test_(recomputation_keeps_less|\S*\[K=)",
        r"gpu/test_checks\.py::test_(a_launch_leaves_out|freezing_and_the_cache)",
        # Of each kind one stays, and where the answer differs one of each answer.
        r"training/test_computed_once\.py::test_(classes_that\S*\[(IBert|Beit)|evaluations_read\S*\[(convnext|clip-True)"
        r"|weights_that\S*\[epoch-True|masks_over\S*\[auto|what_frozen_layers_do\S*\[(Larger|RarelyZero))",
        r"training/test_flattened_batches\.py::test_rows_of_an_own\S*\[True",
        r"training/test_head_slices\.py::test_numbers\S*\[(gpt2|llama)",
        r"training/test_whole_loss\.py::test_(a_step_whose\S*\[2|any_loss_of_a_batch\S*\[(hardest|span|weighted))",
        r"distributed/test_faults\.py::test_a_rank_that_disagrees\S*\[(data|pipeline)",
        r"distributed/test_saving\.py::.*bert_sequence",
        r"data/test_loaders\.py::test_a_run_reads_and_draws\S*\[(drawn|a collator|buckets|fewer|seeded)",
        r"data/test_loaders\.py::test_no_sample_of_a_stream_is_lost\S*\[(stages-(counting|own|shuffled)|left-of)",
        r"engine/test_token_slices\.py::test_slices_give\S*\[(qwen2-|gpt2-[12])",
        r"runtime/test_collecting\.py::test_every_family\S*\[(?!bert_masked|vit|gpt2|llama|mixtral)",
        r"schedules/test_schedules\.py::test_every_table_with_frozen\S*\[some-[67]-",
        r"project/test_private_names\.py::test_later_pythons\S*\[12",
        r"project/test_code_blocks\.py::\S*recipes/(frozen|lora|vision_language)",
        r"startup/test_planned_images\.py::test_(the_command\S*\[smolvlm|the_first_block\S*\[(qwen2_vl|llava))",
        # An edit is followed alike within an epoch and at its end, in a script's own part and in a package's: of every
        # kind of edit the package's parts at an epoch stay, of the others what is found in another way.
        r"training/test_frozen_in_a_run\.py::test_an_edit_that_shows\S*\[(within one-(?!state loaded|attribute)"
        r"|at an epoch-(state |data |module |hook|parametrized|unfrozen|forward)[^\]]*-script)",
        # [workers] stays; of compiled models tests/engine/test_program.py.
        r"training/test_unread_samples\.py::test_from_the_third_epoch\S*\[persistent",
        r"training/test_computed_once\.py::test_numbers_are_trainers\S*\[probe {'torch_compile",
        # [whisper] stays of each setting, and of the families in test_any_trainer_reads one with images.
        r"training/test_computed_once\.py::test_numbers_are_trainers\S*\[llava {'(gradient_checkpointing|bf16)",
        r"training/test_computed_once_callback\.py::test_any_trainer_reads\S*\[(paligemma|qwen2-vl)",
        # A rank that disagrees in its arguments stays.
        r"distributed/test_transition_faults\.py::test_ranks_that_read_different_plans",
        # An exception in a collator, and a rank that is killed in the middle of a step, stay.
        r"distributed/test_faults\.py::test_(an_exception_in_compute_loss|a_rank_killed_before_the_loss)",
        # A family of each way in which images enter stays, and all of them where stages are put together.
        r"splitters/test_media\.py::test_the_work_of_frozen\S*\[(?!llava\]|qwen3_5|gemma3|smolvlm)",
        # Zero bubbles on 2x1 stay; 4 stages start in test_transitions.py.
        r"distributed/test_equality\.py::.*\[4x1-bert_masked-zb_v",
        # [ends] stays; [stored, resumed], [not stored, stream] and [stored, hooks inside] stay.
        r"comm/test_topology\.py::test_a_script_that_does_not_leave\S*\[fails",
        r"conformance/test_calls\.py::test_one_process\S*\[(nothing frozen, resumed|stored, stream"
        r"|not stored, hooks)",
        # Every launch shows them.
        r"distributed/test_launcher\.py::test_(a_failing_rank_is_echoed|every_rank_has_its_own|ranks_meet|neighbours_are"
        r"|one_process_gets)",
        # Long ones: what they look at is looked at by others, too, or changes seldom.
        r"cache/test_store\.py::test_(a_kill_leaves_only_whole_rows|ids_of_weights)",
        r"cache/test_cache_run\.py::test_(a_kept_row_is_served|what_one_process_reads|weights_that_change_while"
        r"|what_frozen_layers_compute_may_change\S*\[(hook|one))",
        r"comm/test_fault_board\.py::test_ranks_without_a_heartbeat",
        r"data/test_loaders\.py::test_workers_read_copies",
        r"elastic/test_migration\.py::test_(a_source_has|every_rank_ends|frozen_bundles)",
        r"freeze/test_unfreezing\.py::test_rows_of_before",
        r"planning/test_token_runs\.py::test_(a_run_with_slices|slices_(of_a_run|are_planned)|the_collator|whole_seq"
        r"|a_model_whose|labels_smoothed|a_loss_of|layers_that|a_plan_is_never\S*\[32-[48])",
        r"project/test_cli\.py::test_(a_plan_counts_master|a_plan_says_before|a_plan_that_fits_nowhere|adapters_train)",
        r"project/test_private_names\.py::test_a_release_that",
        r"report/test_report\.py::test_(names_of_runs|the_page_stands)",
        r"splitters/test_adapters\.py::test_(layers_below_the_first|saved_adapters_load)",
        r"state/test_going_on\.py::test_(a_policy_remembers|a_replayed_run_stores|a_resumed_run_saves)",
        r"state/test_only_run\.py::test_(of_many_that_find|trainings_that_follow\S*\[freezing)",
        r"trainer/test_(mixin\.py::test_an_optimizer_of_ours|preferences\.py::test_(a_plan_counts|a_mean_over|pairs_of)"
        r"|trl\.py::test_a_training_goes_on)",
        # [auto-options0-read] stays: of what is read, or computed, the partition is compared in the same way.
        r"startup/test_planned_images\.py::test_plan_and_start_count\S*\[(on|off|auto-options2)",
        # A rank that is killed between two flushes, and one in the middle of a transition, stay.
        r"distributed/test_faults\.py::test_a_rank_killed_in_mid_step",
        r"distributed/test_transition_faults\.py::test_(rank_0_decides|a_bit_that_differs)",
        r"comm/test_fault_board\.py::test_a_killed_process_of_this_machine\S*\[False",
        # One refusal on stages and one on replicas stay; tests/training/test_head_slices.py has the numbers of slices.
        r"distributed/test_loss_call\.py::test_a_loss_that_stages\S*\[two stages-(of_embeddings|of_w|with_decay)",
        r"distributed/test_head_slices\.py::test_as_few_as_fit",
        r"training/test_computed_once_callback\.py::test_seq2seq",
        r"training/test_unread_samples\.py::test_(how_long_steps|some_samples_that_are_others\S*\[2)",
        r"trainer/test_trl\.py::test_pictures_are_looked_at_once",
        r"engine/test_token_slices\.py::test_recomputed_slices",
        r"engine/test_program\.py::test_(recomputation_of_compiled|micro_batches_in_flight\S*trained)",
        r"cache/test_cache_run\.py::test_a_kept_store_is_served\S*\[False",
        r"state/test_only_run\.py::test_(of_many_that_begin|a_second_run_is_refused\S*\[freezing)",
        # Of each of these another one of the kind stays.
        r"distributed/test_(decisions\.py::test_unequal|sft_log\.py|failure\.py::test_an_error_that_the_script)",
        r"distributed/test_faults\.py::test_(a_fault_amid_steps\S*killed-1|an_exception_elsewhere\S*collator)",
        r"distributed/test_behaviour\.py::test_every_rank_learns\S*communicates",
        r"distributed/test_loss_call\.py::test_a_loss_that_stages\S*(of_an_evaluation|\[two stages-twice)",
        r"cache/test_store\.py::test_what_a_dead_run",
        r"comm/test_topology\.py::test_a_script_that_does_not_leave\S*ends-left",
        r"trainer/test_(mixin\.py::test_losses_that_trainer_adds_up|preferences\.py::test_pairs_stay_together)",
        r"startup/test_planned_images\.py::test_the_command_says\S*qwen2_vl",
        r"scripts/test_front\.py::test_runs_go_on",
        r"report/test_trackers\.py::test_a_tracker_gets\S*tensorboards",
        r"distributed/test_media\.py|distributed/test_whole_loss\.py|distributed/test_sharded_plan\.py",
        r"distributed/test_behaviour\.py::test_(outputs_of_any|metrics_may|of_equal)",
        r"distributed/test_transition_faults\.py::test_a_rank_killed",
        r"training/test_(unread_samples\.py::test_a_process_that_trains|computed_once_callback\.py::test_callbacks_of)",
        r"splitters/test_media\.py::test_(a_stored_tower_that|a_tower_with_adapters|text_alone\S*qwen|micro_b\S*qwen)",
        r"startup/test_planned_images\.py::test_(the_command|only_what_stores)",
        r"state/test_going_on\.py::test_another_learning_rate",
        r"state/test_only_run\.py::test_(workers_that|trainings_that|a_second_run)",
        r"trainer/test_(left_to_trainer\.py::test_what_a_model_(raises|changes)|preferences\.py::test_pairs_are_not)",
        r"comm/test_fault_board\.py::test_a_store_that_does_not",
        # Of tools and of the tests themselves.
        r"project/test_(mutations\.py::test_what_a_test_sees|site\.py)",
        r"distributed/test_launcher\.py::test_a_hanging_launch",
        r"project/test_mutations\.py::test_all_rooms",
        r"scripts/test_gpu_bench\.py::test_a_launch_that_outlasts",
    )
)


def is_nightly_file(path: Path) -> bool:
    """Return True for a file of which `make test` leaves out every test."""
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).as_posix() in FILES


def is_nightly(name: str) -> bool:
    """Return True for the id of a test that `make test` leaves out."""
    inside = name.split("tests/", 1)[-1]
    return inside.startswith(FILES) or any(pattern.match(inside) for pattern in CASES)
