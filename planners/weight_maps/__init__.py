"""Weight maps between model definitions: declared names and axes, elements located by arithmetic.

`axes` parses the axes of a tensor, `rules` matches names, `weight_map` checks a whole map against a
checkpoint. The results are `pieces`: source elements with their target elements.
"""
