"""The second world: textured objects that move through places, before a camera that may pan.

The world is scene (what can be shown), render (how it looks), fit and judge (how well a clip shows it). It uses the
package as a stranger's world would: its judge is a reward by import path, its prompts are files (prompts.py writes them) and its model is
a folder, `model/`, which `research/pretraining/scenes/` makes.
"""
