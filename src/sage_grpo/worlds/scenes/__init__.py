"""The second world: textured objects that move through places, before a camera that may pan.

The world is scene (what can be shown), render (how it looks), fit and judge (how well a clip shows it). Its model is a folder beside the
package, and `worlds/making/scenes/` is what makes it.
"""
