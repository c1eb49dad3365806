"""The key that asks for a watermark."""

from __future__ import annotations

import attrs
from decodekit.context import BindContext
from decodekit.fields import option

from .configs import SynthIDTextWatermarkingConfig, WatermarkingConfig


@attrs.frozen
class Watermark:
    """Holds `watermarking_config`: read, checked and written back; nothing in this version writes the mark itself."""

    watermarking_config: WatermarkingConfig | SynthIDTextWatermarkingConfig | None = option(
        "Watermark to write into the text: a WatermarkingConfig or SynthIDTextWatermarkingConfig, or its fields.",
        default=None,
    )

    def bind(self, ctx: BindContext, /) -> None:
        """Raises ValueError where a watermark is asked for: a text must not pass for marked."""
        if self.watermarking_config is not None:
            raise ValueError(
                "this version of decodekit can keep it and write it to files, but not mark a text: "
                "set watermarking_config=None to generate without"
            )
