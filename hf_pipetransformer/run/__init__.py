"""What a pipeline adds to a training run, in parts; the trainer's overrides call them."""
