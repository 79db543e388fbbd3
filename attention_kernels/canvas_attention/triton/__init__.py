"""Canvas attention over a paged cache, in Triton.

One program takes a tile of query rows of one sequence together with all query heads that share a
key head, so that a key tile is read once for the whole group, and walks over the key tiles that
some of its rows see. Scores never reach memory. Where a batch has too few programs for the GPU, the
keys of a tile are cut into splits that run as programs of their own; each writes an unnormalised
fp32 partial (accumulator, row maximum, row sum), and a second kernel folds them in order. How many
splits are launched follows from the rows of the batch and the window, so a graph that was captured
for the longest context is cut as one for a short context; how many of them a tile uses, from its
own sequence, on the device. A tile in one piece is written directly, which gives the same bits as a
fold of one partial, and the splits that it leaves over return at once. Without splits, or with as
many, the output of a sequence does not depend on who shares its batch.

Everything that varies from step to step (lengths, causal rows, block table, spans) is read from
the device, and the grid follows from shapes and the bounds the caller gives, so a captured graph
replays with new values. What the layers of a kind share in a step is worked out once
(``CanvasLaunch``).

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size; a position
counts the keys before it.
"""
