"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `items` (what is ordered), `orders` (within which windows, and what is known beforehand, by
`propagation`), `variables`, `constraints` (with `memory` and `cuts`), `objective`, `model` (which
lists them in order), then `start` (programs -> values) and `lowering` (values -> programs).
`context` and `surroundings` fix what stands around a window; `tricks` are the switches.
"""
