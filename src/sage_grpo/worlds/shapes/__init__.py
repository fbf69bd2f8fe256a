"""The embedded world: moving shapes, and a judge that knows exactly what a clean clip looks like.

The world is scene (what can be shown), render (how it looks), fit and judge (how well a clip shows it). `assets/` holds a miniature
HunyuanVideo-1.5 that draws it, and research/pretraining made that checkpoint: nothing of it runs when the world is used.
"""
