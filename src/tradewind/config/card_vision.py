"""The tower that makes images into tokens: what `config.json` and `preprocessor_config.json` say of it, in one record.

Knows: shapes of the tower, how an image is cut, which ids stand for it, its parameters. Refuses to know: the decoder (card_hf), how images
are read (serving/images.py) and computed (layers/vision.py).

Two files may state the bounds of an image's size, in two spellings: `min_pixels` and `max_pixels`, or `size` with `shortest_edge` and
`longest_edge`, which are numbers of pixels too, whatever their names say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tradewind.config.fields import CardError, Fields, plain_float, plain_int

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images (Radford et al. 2021), in which these models see."""
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Where no file states them."""


class VisionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An image tower of the Qwen2.5-VL kind (Bai et al. 2025): patches, windows, and a merger of neighbours into one token."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patch: int
    """Pixels of a patch's edge."""
    frames: int
    """Pictures of a patch; of a still image the same one, so often."""
    merge: int
    """Patches of the edge of a square that becomes one token."""
    window: int
    """Pixels of the edge of a window of attention."""
    full_layers: tuple[int, ...]
    """Layers whose attention has no windows."""
    out: int
    """Size of a token, that of the decoder's."""
    theta: float = 1e4
    norm_eps: float = 1e-6
    image_token: int
    """What stands for an image in a text, once for each of its tokens."""
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @property
    def edge(self) -> int:
        """Pixels of the edge of the square that becomes one token."""
        return self.patch * self.merge

    @property
    def parameters(self) -> int:
        """Weights and biases of the tower, as files have them."""
        wide, merged = self.hidden, self.hidden * self.merge**2
        attention = 4 * wide * wide + 4 * wide
        mlp = 3 * wide * self.intermediate + 2 * self.intermediate + wide
        merger = wide + merged * merged + merged + merged * self.out + self.out
        return self.layers * (attention + mlp + 2 * wide) + merger + wide * 3 * self.frames * self.patch**2


def vision_facts(outer: Fields, *, hidden: int, preprocessor: Mapping[str, Any] | None) -> VisionFacts:
    """The tower of a `config.json`; changes nothing. Raises CardError naming the field.

    hidden: the decoder's size. preprocessor: content of `preprocessor_config.json`.
    """
    fields = outer.mapping("vision_config")
    if fields is None:
        raise outer.refuse("vision_config", "an object that describes the image tower")
    if fields.word("hidden_act", default="silu") != "silu":
        raise fields.refuse("hidden_act", "'silu', the only one that is supported for the image tower")
    wide, heads = fields.whole("hidden_size", default=3584), fields.whole("num_heads", default=16)
    if wide % heads or wide // heads % 16:
        raise fields.refuse("hidden_size", f"such that each of the {heads} heads has a multiple of 16 dims")
    channels = fields.whole("in_channels", default=fields.whole("in_chans", default=3))
    if channels != 3:
        raise fields.refuse("in_channels", "3: images are red, green and blue")
    out = fields.whole("out_hidden_size", default=3584)
    if out != hidden:
        raise fields.refuse("out_hidden_size", f"the decoder's hidden_size, {hidden}")
    layers = fields.whole("depth", default=32, high=4096)
    patch = fields.whole("patch_size", default=fields.whole("spatial_patch_size", default=14), high=256)
    merge = fields.whole("spatial_merge_size", default=2, high=16)
    window = fields.whole("window_size", default=112)
    if window < patch * merge:
        raise fields.refuse("window_size", f"at least the {patch * merge} pixels that become one token")
    rope = fields.mapping("rope_parameters")
    stated = VisionFacts(
        layers=layers,
        hidden=wide,
        heads=heads,
        intermediate=fields.whole("intermediate_size", default=3420),
        patch=patch,
        frames=fields.whole("temporal_patch_size", default=2, high=16),
        merge=merge,
        window=window,
        full_layers=full_layers(fields, layers=layers),
        out=out,
        theta=1e4 if rope is None else rope.number("rope_theta", default=1e4),
        image_token=outer.whole("image_token_id", default=151655, low=0),
    )
    return stated if preprocessor is None else as_processed(stated, preprocessor, origin=outer.origin)


def full_layers(fields: Fields, *, layers: int) -> tuple[int, ...]:
    """`fullatt_block_indexes`, those of the published sizes where the file does not say."""
    listed = fields.values.get("fullatt_block_indexes")
    if listed is None:
        listed = [7, 15, 23, 31]
    numbers = [plain_int(item) for item in listed] if isinstance(listed, list | tuple) else [None]
    if any(number is None or not 0 <= number < layers for number in numbers):
        raise fields.refuse("fullatt_block_indexes", f"a list of layers from 0 to {layers - 1}")
    return tuple(sorted(number for number in numbers if number is not None))


def as_processed(facts: VisionFacts, preprocessor: Mapping[str, Any], *, origin: str) -> VisionFacts:
    """The facts with what `preprocessor_config.json` states; what would make other pixels than those computed here is refused."""
    fields = Fields(preprocessor, origin=origin.replace("config.json", "preprocessor_config.json", 1))
    for field, only in (
        ("patch_size", facts.patch),
        ("merge_size", facts.merge),
        ("temporal_patch_size", facts.frames),
    ):
        if fields.whole(field, default=only) != only:
            raise fields.refuse(field, f"{only}, as config.json has it")
    for field in ("do_resize", "do_rescale", "do_normalize"):
        if not fields.flag(field, default=True):
            raise fields.refuse(field, "true, the only way that is supported")
    if fields.has("resample") and fields.whole("resample", low=0) != BICUBIC:
        raise fields.refuse("resample", f"{BICUBIC} (bicubic), the only one that is supported")
    if fields.has("rescale_factor") and abs(fields.number("rescale_factor") * 255 - 1) > 1e-6:
        raise fields.refuse("rescale_factor", "1 / 255, the only one that is supported")
    size = fields.mapping("size") or Fields({}, origin=fields.origin)
    least = fields.whole(
        "min_pixels", default=size.whole("shortest_edge", default=size.whole("min_pixels", default=MIN_PIXELS))
    )
    most = fields.whole(
        "max_pixels", default=size.whole("longest_edge", default=size.whole("max_pixels", default=MAX_PIXELS))
    )
    if most < max(least, facts.edge**2):
        raise fields.refuse("max_pixels", f"at least min_pixels, {least}, and the {facts.edge**2} pixels of one token")
    return msgspec.structs.replace(
        facts,
        min_pixels=least,
        max_pixels=most,
        mean=three_numbers(fields, "image_mean", CLIP_MEAN),
        std=three_numbers(fields, "image_std", CLIP_STD, above=0.0),
    )


BICUBIC = 3
"""As Pillow numbers its filters."""


def three_numbers(
    fields: Fields, field: str, usual: tuple[float, ...], *, above: float | None = None
) -> tuple[float, ...]:
    """One number for each color."""
    listed = fields.values.get(field)
    if listed is None:
        return usual
    numbers = [plain_float(item) for item in listed] if isinstance(listed, list | tuple) else []
    found = tuple(number for number in numbers if number is not None and (above is None or number > above))
    if len(found) != 3 or len(numbers) != 3:
        raise fields.refuse(field, "a list of three numbers" + ("" if above is None else f" over {above:g}"))
    return found


def mrope_sections(fields: Fields, *, pairs: int) -> tuple[int, ...]:
    """How many of a head's rotated pairs turn by time, row and column (`mrope_section`). Raises CardError."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.mapping(name)
        if rope is None or not rope.has("mrope_section"):
            continue
        listed = rope.values["mrope_section"]
        numbers = [plain_int(item) for item in listed] if isinstance(listed, list | tuple) else []
        found = tuple(number for number in numbers if number is not None and number >= 0)
        if len(found) != 3 or len(numbers) != 3 or sum(found) != pairs:
            raise rope.refuse(
                "mrope_section", f"three whole numbers that are {pairs} together, the rotated pairs of a head"
            )
        return found
    raise CardError(f"{fields.origin}: no mrope_section, which says what part of a head turns by time, row and column")
