"""A labelled support set and the head fitted to it: predictions, calibration, unknown classes, summary, influence.

Nothing here knows images, networks or files.
"""
