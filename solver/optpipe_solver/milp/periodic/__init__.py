"""The periodic model: one micro-batch repeated every T, its size independent of their number.

``docs/periodic.md`` has the mathematics; `search` asks for the smallest period or the smallest
memory, `unroll` turns the block into programs, `improve` is the portfolio's part.
"""
