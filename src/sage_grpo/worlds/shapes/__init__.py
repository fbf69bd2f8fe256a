"""The embedded world: moving shapes, and a judge that knows exactly the pixels of a clean clip.

The modules are scene (the attributes), render (their pixels), fit and judge (the scores of a clip). `assets/` holds a miniature HunyuanVideo-1.5 that
draws it, and research/pretraining made that checkpoint: nothing of it runs when the world is used.
"""
