"""The full-horizon model: every action of every micro-batch, ordered by binaries.

Read `items` (what is ordered, and within which window), `variables`, `constraints`, `objective`,
`model` (which lists them in order), then `start` (programs -> values) and `lowering` (values ->
programs).
"""
