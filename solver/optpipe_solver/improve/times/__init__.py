"""Times on a board after a move, the longest path they make, and the tails behind each action."""
