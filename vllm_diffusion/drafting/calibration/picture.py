"""Picture of a training run as plain SVG: loss over steps, loss and acceptance by position."""

from collections.abc import Sequence

from vllm_diffusion.drafting.calibration.train import Progress

_WIDTH, _HEIGHT, _MARGIN = 260, 180, 40
_STYLE = (
    "text{font:11px sans-serif;fill:#555}path{fill:none;stroke:#2563eb;stroke-width:2}"
    "rect{fill:#2563eb}line{stroke:#999}"
)


def draw_training(history: Sequence[Progress]) -> str:
    """Draw an SVG of three panels: the loss of each report, and the last report's figures by
    position.

    Args:
        history: Result of :func:`~vllm_diffusion.drafting.calibration.train.train`.
    """
    last = history[-1]
    panels = [
        _line("loss, nats a masked token", [p.step for p in history], [p.loss for p in history]),
    ]
    if last.acceptance_by_position:
        title = (
            f"accepted up to a position ({last.accepted:.2f} of {len(last.acceptance_by_position)})"
        )
        panels.append(_bars("loss by position, nats", last.loss_by_position))
        panels.append(_bars(title, last.acceptance_by_position, top=1.0))
    width = _MARGIN + len(panels) * (_WIDTH + _MARGIN)
    body = "".join(
        f'<g transform="translate({_MARGIN + i * (_WIDTH + _MARGIN)},{_MARGIN})">{panel}</g>'
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + 2 * _MARGIN}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" style="fill:#fff"/>{body}</svg>\n'
    )


def _axes(title: str, left: str, right: str, top: float) -> str:
    return (
        f'<text x="0" y="-12">{title}</text>'
        f'<line x1="0" y1="0" x2="0" y2="{_HEIGHT}"/>'
        f'<line x1="0" y1="{_HEIGHT}" x2="{_WIDTH}" y2="{_HEIGHT}"/>'
        f'<text x="-5" y="8" text-anchor="end">{top:.2g}</text>'
        f'<text x="0" y="{_HEIGHT + 16}">{left}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{right}</text>'
    )


def _line(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    top = max([*values, 1e-9])
    points = [
        f"{_WIDTH * step / steps[-1]:.1f},{_HEIGHT * (1 - value / top):.1f}"
        for step, value in zip(steps, values, strict=True)
    ]
    return _axes(title, "step 0", str(steps[-1]), top) + f'<path d="M{" L".join(points)}"/>'


def _bars(title: str, values: Sequence[float], top: float | None = None) -> str:
    top = top or max(max(values), 1e-9)
    wide = _WIDTH / len(values)
    bars = "".join(
        f'<rect x="{i * wide + 2:.1f}" y="{_HEIGHT * (1 - value / top):.1f}" '
        f'width="{wide - 4:.1f}" height="{_HEIGHT * value / top:.1f}"/>'
        for i, value in enumerate(values)
    )
    return _axes(title, "position 1", str(len(values)), top) + bars
