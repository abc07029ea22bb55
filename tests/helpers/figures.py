"""What is written in a figure."""

import itertools


def texts(figure):
    """Return everything that is written in a figure, and the pairs of texts that
    overlap.
    """
    from matplotlib.text import Text

    figure.draw_without_rendering()
    ticks = {}
    for axes in figure.axes:
        for axis, (low, high), place in (
            (axes.xaxis, axes.get_xlim(), 0),
            (axes.yaxis, axes.get_ylim(), 1),
        ):
            ticks |= {
                label: low <= label.get_position()[place] <= high
                for label in axis.get_ticklabels()
            }
    shown = [
        text
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and ticks.get(text, True)
    ]
    boxes = [
        (text.get_text(), text.get_window_extent().shrunk(0.9, 0.9)) for text in shown
    ]
    overlapping = [
        (one, other)
        for (one, box), (other, other_box) in itertools.combinations(boxes, 2)
        if box.overlaps(other_box)
    ]
    return [text for text, _ in boxes], overlapping
