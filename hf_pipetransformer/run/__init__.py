"""What a pipeline adds to a training run, in parts; the trainer's overrides call them.

```
Run         lives as long as the trainer: ranks, journal of events, patience, policy, splitter
Pipeline    the model on its stages, from one start to the next
Resumption  one call of `train()` from its begin: what it goes on from, what the run says of itself
Training    one call of `train()` from the moment that its optimizer exists: pipeline, loader, optimizer state,
            controller of freezing, cache, checkpoints
```

A part is made when all that it needs is there, and says in its constructor what that is: `Trainer` only where it
follows the trainer's living state. None sets an attribute of the trainer that is not Trainer's own and public.
"""
