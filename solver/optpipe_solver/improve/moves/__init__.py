"""What can be changed on a board: orders, modes, many micro-batches; and making it fit."""
