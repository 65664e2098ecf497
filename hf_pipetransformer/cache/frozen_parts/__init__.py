"""Towers, encoders and other parts that a script froze: seen in its first steps, read by what they are called with.

A `FrozenPart` gets the calls of a module. A `PartCall` has the `Rows` that it was called with, and gives `Deferred`
outputs, whose form a `Template` knows. What `Watch` has seen of a part is a `Plan`: why not, or the `Reading`, which
says which outputs a record holds. Its `Records` lie in a `ContentStore` and are checked, and ended, by `ServingParts`.
`StoredParts` is all of it in a training.
"""
