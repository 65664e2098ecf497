"""Stored activations of what a script froze: files, records, hashes, and whether storing pays.

A store is written and read in one place, `store.ActivationStore`, in the format of `records`, in files of `files`. A
folder is taken, kept and deleted in `folder`; the processes of a node open a store together in `storage`, within the
limit of the run.

A prefix of layers on pipeline stages has records by the index of a sample: `inputs` knows samples again, `opening`
opens the store, `cache` finds the records of batches and takes new ones, `chain` knows the weights, and
`training` follows the layout. Other frozen parts have records by what they are called with: `frozen_parts`.
"""
