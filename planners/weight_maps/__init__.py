"""From one model definition's weights to another's: names and axes declared, elements found by arithmetic.

`axes` reads how a tensor is made of axes, `rules` matches names, `weight_map` checks a whole map against a
checkpoint; what comes out are `pieces`: which elements of the source are which of the target.
"""
