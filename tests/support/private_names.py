"""What the package uses of other libraries that they do not promise: private names, methods that it overrides, names
of arguments and fields, defaults.

After a new release of one of them `pytest tests/project/test_private_names.py` says what has changed. Look at each
use, then write here what the new release has.
"""

from __future__ import annotations


# Private functions and classes: where they are, and their parameters with the defaults.
CALLED = {
    "numpy:_core.multiarray._reconstruct": None,
    "atexit:_run_exitfuncs": None,
    "os:_exit": "status",
    "sys:_current_frames": "",
    "torch:_C.DisableTorchFunctionSubclass": None,
    "torch:_C._nn._parse_to": None,
    "torch.nn.modules.module:_global_backward_hooks": None,
    "torch.nn.modules.module:_global_forward_hooks": None,
    "torch.nn.modules.module:_global_forward_pre_hooks": None,
    # Builtins, which tell no parameters.
    "torch:_foreach_add_": None,
    "torch:_foreach_addcdiv_": None,
    "torch:_foreach_copy_": None,
    "torch:_foreach_div_": None,
    "torch:_foreach_mul_": None,
    "torch:_foreach_norm": None,
    "torch:_foreach_sqrt": None,
    "torch:_foreach_sub": None,
    "torch.autograd.grad_mode:_unsafe_preserve_version_counter": "tensors",
    "torch.distributed.distributed_c10d:_get_default_store": "",
    "torch.distributed.distributed_c10d:_set_pg_timeout": "timeout, group=None",
    "torch.distributed.distributed_c10d:_world": None,
    "torch.nn.modules.batchnorm:_BatchNorm": None,  # Instances are asked for.
    "torch.nn.modules.dropout:_DropoutNd": None,
    "torch:ops.aten._scaled_dot_product_flash_attention": None,
    "torch.utils:_python_dispatch.TorchDispatchMode": None,  # Subclassed.
    "torch.utils:_pytree.register_pytree_node": None,
    "torch.utils:_pytree.tree_leaves": None,
    "torch.utils:_pytree.tree_map_only": None,
    # Not private by name, but nowhere promised.
    "transformers.conversion_mapping:get_model_conversion_mapping": (
        "model, key_mapping=None, hf_quantizer=None, add_legacy=True"
    ),
    "transformers.core_model_loading:WeightConverter": None,
    "transformers.core_model_loading:WeightRenaming": None,
    "transformers.core_model_loading:rename_source_key": (
        "source_key, weight_renamings, weight_converters, base_model_prefix=None, meta_state_dict=None, reverse=False"
    ),
    "transformers:PreTrainedModel._is_stateful": None,
    "transformers.utils.output_capturing:_active_collector": None,
    "transformers.generation:GenerationMixin._prepare_generation_config": "self, generation_config, kwargs",
    "transformers:Trainer._get_collator_with_removed_columns": "self, data_collator, description=None",
    "transformers:Trainer._get_eval_sampler": "self, eval_dataset",
    "transformers:Trainer._get_output_dir": "self, trial",
    "transformers:Trainer._move_model_to_device": "self, model, device",
    "transformers:Trainer._prepare_inputs": "self, inputs",
    "transformers:Trainer._push_from_checkpoint": "self, checkpoint_folder",
    "transformers:Trainer._save": "self, output_dir=None, state_dict=None",
    "transformers:Trainer._remove_unused_columns": "self, dataset, description=None",
}

# Private functions that a later release may lack, and what it has in their place, which is then used.
REPLACED = {"torch.distributed.distributed_c10d:_set_pg_timeout": "torch.distributed:set_timeout"}

# Private attributes of objects: where the library sets them.
ATTRIBUTES = {
    "datasets.arrow_dataset:_fingerprint": "Dataset",
    "torch.amp.grad_scaler:_per_optimizer_states": "GradScaler",
    "torch.nn.modules.module:_backward_hooks": "Module",
    "torch.nn.modules.module:_backward_pre_hooks": "Module",
    "torch.nn.modules.module:_buffers": "Module",
    "torch.nn.modules.module:_call_impl": "Module",
    "torch.nn.modules.module:_forward_hooks": "Module",
    "torch.nn.modules.module:_forward_pre_hooks": "Module",
    "torch.nn.modules.module:_state_dict_hooks": "Module",
    "transformers.configuration_utils:_attn_implementation": "PreTrainedConfig",
    "transformers.modeling_utils:_require_grads_hook": "PreTrainedModel",
    "transformers.modeling_utils:_supports_sdpa": "PreTrainedModel",
    "transformers.trainer:_globalstep_last_logged": "Trainer",
    "transformers.trainer:_loss_shifts_labels": "Trainer",
    "transformers.trainer:_total_loss_scalar": "Trainer",
    "transformers.trainer:_tr_loss": "Trainer",
    "trl.trainer.sft_trainer:_metrics": "SFTTrainer",
    "trl.trainer.sft_trainer:_total_train_tokens": "SFTTrainer",
}

# What is public, but handled by its name, with `|` between the names of two releases. Layers whose arguments splitters
# take apart, and outputs that are made here or sent between stages: all that they have.
TAKEN_APART = {
    "transformers.models.bert.modeling_bert:BertLayer.forward": (
        "self, hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None, "
        "past_key_values|cache=None, kwargs"
    ),
    "transformers.models.beit.modeling_beit:BeitLayer.forward": (
        "self, hidden_states, attention_mask=None, interpolate_pos_encoding=False, resolution=None, kwargs"
    ),
    "transformers.models.gpt2.modeling_gpt2:GPT2Block.forward": (
        "self, hidden_states, past_key_values|cache=None, attention_mask=None, encoder_hidden_states=None, "
        "encoder_attention_mask=None, use_cache=False, kwargs"
    ),
    "transformers.models.gpt2.modeling_gpt2:GPT2Attention.forward": (
        "self, hidden_states, past_key_values|cache=None, attention_mask=None, encoder_hidden_states=None, "
        "encoder_attention_mask=None, output_attentions=False, kwargs"
    ),
    "transformers.modeling_outputs:BaseModelOutputWithPast": (
        "last_hidden_state=None, past_key_values|cache=None, hidden_states=None, attentions=None"
    ),
    "transformers.modeling_outputs:CausalLMOutputWithPast": (
        "loss=None, logits=None, past_key_values|cache=None, hidden_states=None, attentions=None"
    ),
    "transformers.modeling_outputs:SequenceClassifierOutput": (
        "loss=None, logits=None, hidden_states=None, attentions=None"
    ),
    "transformers.generation:GenerateDecoderOnlyOutput": (
        "sequences, scores=None, logits=None, attentions=None, hidden_states=None, past_key_values|cache=None"
    ),
}
# What is called by keywords, and options whose value means something as long as nobody has set them: those alone.
GIVEN_BY_NAME = {
    "accelerate:Accelerator.unwrap_model": "keep_torch_compile=True",
    "accelerate.data_loader:SeedableRandomSampler": "args, kwargs",  # As `RandomSampler` takes them.
    "accelerate.utils:send_to_device": "non_blocking=False",
    "accelerate.utils:DistributedDataParallelKwargs": "comm_hook=<DDPCommunicationHookType.NO: 'no'>",
    "datasets:IterableDataset.from_generator": "gen_kwargs=None",
    "peft:LoraConfig": "r=8, target_modules=None",
    "peft:set_peft_model_state_dict": "adapter_name='default'",
    "transformers:LlamaConfig": (
        "vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, "
        "tie_word_embeddings=False"
    ),
    "transformers:LlamaForCausalLM.forward": (
        "input_ids=None, attention_mask=None, position_ids=None, past_key_values|cache=None, labels=None, "
        "use_cache=None"
    ),
    "transformers:PreTrainedConfig.get_text_config": "decoder=None",
    "transformers:PreTrainedModel.from_pretrained": "config=None, ignore_mismatched_sizes=False",
    "transformers:PreTrainedModel.get_encoder": "modality=None",
    "transformers:Trainer.compute_loss": "return_outputs=False, num_items_in_batch=None",
    "transformers:Trainer.push_to_hub": "commit_message='End of training', revision=None",
    "transformers:TrainingArguments": (
        "optim='adamw_torch_fused', average_tokens_across_devices=True, max_grad_norm=1.0, "
        "torch_empty_cache_steps=None, auto_find_batch_size=False, logging_nan_inf_filter=True, "
        "include_num_input_tokens_seen='no', eval_use_gather_object=False, save_on_each_node=False, "
        "dataloader_in_order=True, train_sampling_strategy='random', ddp_bucket_cap_mb=None, "
        "ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_timeout=1800"
    ),
    "transformers.trainer_pt_utils:AcceleratorConfig": (
        "split_batches=False, even_batches=True, use_seedable_sampler=True"
    ),
}
# What `generate` gives to a decoder's forward.
GIVEN_BY_GENERATE = {
    "attention_mask", "input_ids", "logits_to_keep", "past_key_values|cache", "position_ids", "return_dict",
    "use_cache",
}  # fmt: skip

# Attributes of tensors, which no source text of Python shows.
OF_TENSORS = ("_make_wrapper_subclass", "_version")

# Names of transformers that are replaced for a while, with their parameters and the defaults.
PATCHED = {
    "safetensors.torch:save_file": "tensors, filename, metadata=None",
    "transformers.modeling_utils:safe_save_file": "tensors, filename, metadata=None",
    "transformers.trainer:rotate_checkpoints": (
        "output_dir, save_total_limit=None, best_model_checkpoint=None, use_mtime=False, "
        "checkpoint_prefix='checkpoint'"
    ),
    "transformers:Trainer._get_num_items_in_batch": "self, batch_samples, device",
}

# Methods of `Trainer` and its helpers that the trainer room overrides, with their parameters. That the overrides have
# the defaults is tested.
OVERRIDDEN = {
    "CallbackHandler.__init__": "self, callbacks, model, processing_class, optimizer, lr_scheduler",
    "CallbackHandler.call_event": "self, event, args, state, control, kwargs",
    "Trainer.__init__": (
        "self, model, args, data_collator, train_dataset, eval_dataset, processing_class, "
        "model_init, compute_loss_func, compute_metrics, callbacks, optimizers, "
        "optimizer_cls_and_kwargs, preprocess_logits_for_metrics"
    ),
    "Trainer._finalize_training": "self, trial, num_train_samples, start_time",
    "Trainer._get_dataloader": "self, dataset, description, batch_size, sampler_fn, is_training, dataloader_key",
    "Trainer._init_training_state": (
        "self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
    ),
    "Trainer._load_best_model": "self",
    "Trainer._load_from_checkpoint": "self, resume_from_checkpoint, model",
    "Trainer._prepare_for_training": "self, max_steps, train_dataloader, resume_from_checkpoint",
    "Trainer._run_epoch": (
        "self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, "
        "ignore_keys_for_eval, start_time, resume_from_checkpoint, epochs_trained, "
        "steps_trained_in_current_epoch"
    ),
    "Trainer._save_checkpoint": "self, model, trial",
    "Trainer._save_optimizer_and_scheduler": "self, output_dir",
    "Trainer._save_rng_state": "self, output_dir",
    "Trainer._track_num_input_tokens": "self, inputs",
    "Trainer._wrap_model": "self, model, training, dataloader",
    "Trainer.create_accelerator_and_postprocess": "self",
    "Trainer.create_model_card": (
        "self, language, license, tags, model_name, finetuned_from, tasks, dataset_tags, dataset, dataset_args"
    ),
    "Trainer.evaluate": "self, eval_dataset, ignore_keys, metric_key_prefix",
    "Trainer.get_train_dataloader": "self",
    "Trainer.evaluation_loop": ("self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix"),
    "Trainer.floating_point_ops": "self, inputs",
    "Trainer.get_batch_samples": "self, epoch_iterator, num_batches, device",
    "Trainer.hyperparameter_search": (
        "self, hp_space, compute_objective, n_trials, direction, backend, hp_name, kwargs"
    ),
    "Trainer.log": "self, logs, start_time",
    "Trainer.predict": "self, test_dataset, ignore_keys, metric_key_prefix",
    "Trainer.prediction_step": "self, model, inputs, prediction_loss_only, ignore_keys",
    "Trainer.save_metrics": "self, split, metrics, combined",
    "Trainer.save_model": "self, output_dir, _internal_call",
    "Trainer.set_initial_training_values": "self, args, dataloader",
    "Trainer.train": "self, resume_from_checkpoint, trial, ignore_keys_for_eval",
    "Trainer.training_step": "self, model, inputs, num_items_in_batch",
    "TrainingArguments.place_model_on_device": None,  # A property.
}
