"""Canvas attention over a paged cache, in Triton.

One program takes a tile of query rows of one sequence together with all query heads that share a
key head, so that a key tile is read once for the whole group, and walks over the key tiles that
some of its rows see. Scores never reach memory. Where a sequence has few rows and many keys,
its key range is cut into splits that run as programs of their own; each writes an unnormalised
fp32 partial (accumulator, row maximum, row sum), and a second kernel folds them in order. How a
tile is cut depends on its own sequence only, so the output of a sequence never depends on who
shares its batch; a tile in one piece is written directly, which gives the same bits as a fold of
one partial. The scratch of the partials is bounded: larger batches run in several launches.

Everything that varies from step to step (lengths, causal rows, block table, spans) is read from
the device, and the grid follows from shapes and the bounds the caller gives, so a captured graph
replays with new values.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size; a position
counts the keys before it.
"""
