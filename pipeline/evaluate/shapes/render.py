"""Rendering of a video's frames with NumPy."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.shapes.making import REACH
from pipeline.evaluate.shapes.world import COLORS, SHAPES, SIDE, Thing, Video

Image = NDArray[np.float32]
#: All colors are brighter than any ground, so that brightness alone shows the position and shape of a thing.
RGB = dict(
    zip(
        COLORS,
        (
            *((255, 65, 65), (50, 215, 75), (85, 115, 255), (245, 230, 45)),
            *((210, 75, 240), (55, 225, 235), (255, 150, 35), (250, 250, 250)),
        ),
        strict=True,
    )
)
_LOOKS, _FLICKER = 2, 3  # distinguish these random generators from the others of a seed
_FINE = 4  # samples per side of a pixel when a mask is computed
_SPECK = 4  # side of a speck in pixels
_TINT = 12.0  # largest random shift of a thing's color, on a scale of 255
_GRAIN = 1.5  # standard deviation of the ground's grain, on a scale of 255
_INK, _PLATE = 225.0, 8.0
# 3 x 5 dots per letter.
_LETTERS = {
    "A": ".#. #.# ### #.# #.#",
    "E": "### #.. ##. #.. ###",
    "F": "### #.. ##. #.. #..",
    "H": "#.# #.# ### #.# #.#",
    "I": "### .#. .#. .#. ###",
    "L": "#.. #.. #.. #.. ###",
    "O": "### #.# #.# #.# ###",
    "P": "### #.# ### #.. #..",
    "T": "### .#. .#. .#. .#.",
    "U": "#.# #.# #.# #.# ###",
    "X": "#.# #.# .#. #.# #.#",
}


def render(video: Video) -> NDArray[np.uint8]:
    """Render a video as uint8 RGB frames [T, 96, 96, 3]; the same video always gives the same frames."""
    rng = np.random.default_rng([video.seed, _LOOKS, video.n_frames])
    grounds = [_draw_ground(name, rng) for name in video.scenes]
    ways = zip(video.scene_of, video.camera, video.zoom, strict=True)
    frames = np.stack([_cut_view(grounds[scene], *way, share) for scene, way, share in ways])
    for thing in video.things:
        _draw_thing(frames, thing, rng.uniform(-_TINT, _TINT, 3).astype(np.float32))
    frames *= np.array(video.light, np.float32)[:, None, None, None]
    _add_specks_and_noise(frames, video)
    return np.clip(np.rint(frames), 0, 255).astype(np.uint8)


@cache
def render_mask(shape: str, size: int) -> Image:
    """Return the coverage of each pixel by a shape, [size, size] from 0 to 1; the array is shared between calls."""
    n = _FINE * size
    down, right = (np.mgrid[:n, :n] + 0.5) / n * 2 - 1
    inside = _compute_shape_mask(shape, right, down)
    share: Image = inside.reshape(size, _FINE, size, _FINE).mean((1, 3)).astype(np.float32)
    return share


def _compute_shape_mask(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which points (x, y) of the square from -1 to 1 lie in the shape, as a mask; y grows downwards."""
    far = np.hypot(x, y)
    wide = np.maximum(abs(x), abs(y))
    # 0 at a tip of the star, 1 halfway between two tips.
    between = 2 * abs((np.arctan2(x, -y) / (2 * np.pi / 5) + 0.5) % 1 - 0.5)
    return {
        "circle": far < 0.95,
        "square": wide < 0.85,
        "triangle": (y < 0.9) & (y > 2 * abs(x) - 0.95),
        "star": far < 1 / (1 + 1.6 * between),
        "cross": (np.minimum(abs(x), abs(y)) < 0.32) & (wide < 0.95),
        "ring": (far < 0.98) & (far > 0.52),
        "diamond": abs(x) + abs(y) < 1,
        "moon": (far < 0.98) & (np.hypot(x - 0.5, y + 0.1) > 0.72),
    }[shape]


@cache
def _draw_sign_plate(word: str, size: int) -> Image:
    """Draw a sign as float32 gray values [size, size, 1] up to 255: two letters between bars, in 9 x 9 dots.

    The bars are the top and bottom rows of dots. The array is shared between calls.
    """
    dots = np.zeros((9, 9), bool)
    dots[[0, -1]] = True
    for column, letter in zip((1, 5), word, strict=True):
        dots[2:7, column : column + 3] = [[dot == "#" for dot in row] for row in _LETTERS[letter].split()]
    places = np.arange(size) * 9 // size
    return np.where(dots[places][:, places], _INK, _PLATE).astype(np.float32)[..., None]


def _draw_thing(frames: Image, thing: Thing, tint: Image) -> None:
    """Blend a thing into the frames that show it, in place, by its coverage and contrast.

    Args:
        frames: [T, 96, 96, 3] on a scale of 255.
        tint: RGB offset added to the color of a shape; signs ignore it.
    """
    for t, x, y, color, size in thing.shots:
        if thing.name in SHAPES:
            cover = render_mask(thing.name, size)[..., None]
            paint = np.array(RGB[color], np.float32) + tint
        else:
            cover = np.ones((size, size, 1), np.float32)
            paint = _draw_sign_plate(thing.name, size)
        window = frames[t, y : y + size, x : x + size]
        window += np.float32(thing.contrast) * cover * (paint - window)


def _draw_ground(scene: str, rng: np.random.Generator) -> Image:
    """Draw the dark texture of a scene with a margin for camera movement, [96 + 2 * REACH, 96 + 2 * REACH, 3]."""
    side = SIDE + 2 * REACH
    dark = rng.uniform(18, 42) + rng.uniform(-7, 7, 3)
    light = dark + rng.uniform(20, 34) + rng.uniform(-5, 5, 3)
    period = int(rng.integers(6, 10))
    y, x = np.mgrid[:side, :side] + rng.integers(0, 16, 2)[:, None, None]
    share = _compute_texture(scene, x, y, period, rng.uniform(-1, 1, 2))
    grain = rng.normal(0, _GRAIN, (side, side, 1))
    ground: Image = (dark + (light - dark) * share[..., None] + grain).astype(np.float32)
    return ground


def _compute_texture(
    scene: str, x: NDArray[np.int64], y: NDArray[np.int64], period: int, slope: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the brightness of a scene's texture at pixel coordinates, from 0 to 1; "plain" may exceed this range.

    ``period`` is the pattern's size in pixels. ``slope`` is used only for "plain": the change (right, down) over a
    frame.
    """
    brick = x + (y // period % 2) * period
    textures: dict[str, NDArray[np.number | np.bool_]] = {
        "stripes": x // (period // 2) % 2,
        "checker": (x // period + y // period) % 2,
        "dots": (x % period - period / 2) ** 2 + (y % period - period / 2) ** 2 < (period / 3.2) ** 2,
        "bricks": (y % period < 2) | (brick % (2 * period) < 2),
        "waves": 0.5 + 0.5 * np.sin((y + 3 * np.sin(x / 5)) * 2 * np.pi / period),
        "plain": 0.5 * (x * slope[0] + y * slope[1]) / SIDE,
    }
    return textures[scene].astype(np.float64)


def _cut_view(ground: Image, right: int, down: int, share: float) -> Image:
    """Cut the camera's view [96, 96, 3] out of a ground.

    Args:
        right, down: offset of the picture in pixels, at most REACH. Ignored if ``share`` is not 1.
        share: scale of the picture; below 1 it shows more of the ground, interpolated, and mirrored beyond the border.
    """
    if share == 1.0:
        return ground[REACH - down : REACH - down + SIDE, REACH - right : REACH - right + SIDE]
    at = REACH + SIDE / 2 - 0.5 + (np.arange(SIDE) + 0.5 - SIDE / 2) / share
    low = np.floor(at).astype(int)
    part = (at - low).astype(np.float32)
    last = len(ground) - 1  # beyond its border, the ground is mirrored
    before, after = (last - abs(last - abs(index)) for index in (low, low + 1))
    rows = ground[before] + part[:, None, None] * (ground[after] - ground[before])
    view: Image = rows[:, before] + part[None, :, None] * (rows[:, after] - rows[:, before])
    return view


def _add_specks_and_noise(frames: Image, video: Video) -> None:
    """Add the video's specks and noise to the frames in place, with other random values in each frame.

    A speck that would touch a thing is left out.
    """
    rng = np.random.default_rng([video.seed, _FLICKER, video.n_frames])
    colors = np.array(list(RGB.values()), np.float32)
    for t, frame in enumerate(frames):
        shots = [shot for thing in video.things for shot in thing.shots if shot.frame == t]
        for x, y, color in rng.integers(0, (SIDE - _SPECK, SIDE - _SPECK, len(colors)), (video.specks, 3)).tolist():
            clear = (x + _SPECK < s.x or x > s.x + s.size or y + _SPECK < s.y or y > s.y + s.size for s in shots)
            if all(clear):
                frame[y : y + _SPECK, x : x + _SPECK] = colors[color]
        if video.noise:
            frames[t] += rng.normal(0, video.noise, frame.shape).astype(np.float32)
