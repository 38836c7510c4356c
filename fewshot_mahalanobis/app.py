"""The app: a page in the browser to teach a classifier with and to ask it (``pip install "fewshot-mahalanobis[app]"``).

:class:`Bench` is what the page does, :func:`make_page` the page, :func:`serve` its server. Everything stays on the
machine that runs it: no telemetry, no font or script from elsewhere, nothing sent unless ``share`` asks for it.
"""

from __future__ import annotations

import base64
import copy
import io
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier, predict_all
from fewshot_mahalanobis.images import read_or_reason
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS

try:
    import gradio as gr
except ImportError as error:
    raise ImportError('the app needs Gradio: pip install "fewshot-mahalanobis[app]"') from error

__all__ = ["Answer", "Bench", "make_page", "serve"]

#: The label of images that belong to no class.
UNKNOWN = "unknown"
#: Share of the pictures of known classes that are called that by mistake.
_FALSE_REJECTION_RATE = 0.05
#: Support images that are shown beside an answer, nearest first.
_NEIGHBOURS = 6
_CSS = """
.gradio-container {max-width: 1100px !important; margin: auto}
.said {font-size: var(--text-lg); line-height: 1.5; overflow-wrap: anywhere}
.said strong {font-size: var(--text-xxl)}
.problem {border-left: 4px solid var(--error-border-color); padding-left: .8em; margin-bottom: .8em}
.answer {display: flex; gap: 1.2em; align-items: center}
.answer img {width: 112px}
.pictures {display: grid; grid-template-columns: repeat(auto-fill, minmax(72px, 1fr)); gap: .5em; margin: .3em 0 1em}
.pictures figure {margin: 0; text-align: center; font-size: var(--text-sm); overflow-wrap: anywhere}
.pictures img {width: 100%}
.pictures img, .answer img {
    aspect-ratio: 1; border-radius: var(--radius-md); outline: 1px solid var(--border-color-primary); display: block
}
.state {margin-bottom: .6em}
#remove {align-self: end}
"""


class Neighbour(NamedTuple):
    """A support image that is near a query."""

    label: str
    distance: float  # Euclidean, between adapted features
    picture: NDArray[np.uint8] | None  # (s, s, 3); None where it came with a model file, which keeps no pictures


class Answer(NamedTuple):
    """What is said of one image."""

    label: str  # the most probable class, whether or not the image is of one
    unknown: bool  # never where there is no class of two images, which that is judged by
    probabilities: dict[str, float]
    picture: NDArray[np.uint8]  # (s, s, 3), as the network reads it
    neighbours: list[Neighbour]


class Bench:
    """Classes that grow by images, and the classifier of them, fitted anew after every change.

    Parameters
    ----------
    start : SimpleCNAPS or SimpleCNAPSClassifier
        A pretrained model to fit, or a fitted classifier whose classes are there from the start and whose adaptation
        stays (``partial_fit``).
    device : str
        Where a pretrained model is to run.

    Attributes
    ----------
    classifier : SimpleCNAPSClassifier or None
        None as long as there are fewer than two classes.
    images : list of uint8 ndarray of shape (s, s, 3)
        What was added, as the network reads it.
    names : list of str
        Their classes.
    """

    def __init__(self, start: SimpleCNAPS | SimpleCNAPSClassifier, device: str = "auto") -> None:
        self.start = start
        self.device = device
        self.images: list[NDArray[np.uint8]] = []
        self.names: list[str] = []
        self.classifier = start if isinstance(start, SimpleCNAPSClassifier) else None
        self._folder = tempfile.TemporaryDirectory(prefix="fewshot-app-")

    @property
    def image_size(self) -> int:
        """Side of the square that images are resized to, in pixels."""
        return self.start.image_size if isinstance(self.start, SimpleCNAPS) else self.start.model_.image_size

    def counts(self) -> dict[str, int]:
        """Support images of each class, those of the classifier it started from included."""
        counts = Counter(self.names)
        if isinstance(self.start, SimpleCNAPSClassifier):
            shots = zip(self.start.classes_, self.start.class_counts_, strict=True)
            counts += Counter({str(label): int(count) for label, count in shots})
        return dict(sorted(counts.items()))

    def add(self, name: str, files: Sequence[str]) -> dict[str, str]:
        """Add image files to a class, a new one or one there is.

        Parameters
        ----------
        name : str
        files : sequence of paths

        Returns
        -------
        dict of str to str
            File name to reason of those that cannot be read, which are left out.

        Raises
        ------
        ValueError
            There is no name, no file, or none that can be read. Nothing is added.
        """
        name = name.strip()
        if not name:
            raise ValueError("Give the class a name first.")
        if name == UNKNOWN:
            raise ValueError(f"“{UNKNOWN}” is what images of no class are called: choose another name.")
        if not files:
            raise ValueError(f"Choose one or more pictures of “{name}” first.")
        read, problems = [], {}
        for file in files:
            picture = read_or_reason(file, self.image_size)
            if isinstance(picture, str):
                problems[Path(file).name] = picture
            else:
                read.append(picture)
        if not read:
            raise ValueError("Nothing was added. " + _listed(problems))
        self._become(self.images + read, self.names + [name] * len(read))
        return problems

    def remove(self, name: str) -> None:
        """Take out the images that were added to a class; those of a model file stay."""
        kept = [index for index, other in enumerate(self.names) if other != name]
        self._become([self.images[index] for index in kept], [self.names[index] for index in kept])

    def _become(self, images: list[NDArray[np.uint8]], names: list[str]) -> None:
        """Fit to other images; after an error all is as before."""
        if isinstance(self.start, SimpleCNAPSClassifier):
            classifier = self.start
            if images:
                labels = _labels_like(self.start.classes_, names)
                classifier = copy.deepcopy(self.start).partial_fit(images, labels)
        elif len(set(names)) < 2:
            classifier = None
        else:
            # Pictures that can be left out, to settle the threshold: so few cannot vouch for a lower rate.
            told = sum(count for count in Counter(names).values() if count > 1)
            rejection: dict[str, Any] = {}
            if told:
                rate = max(_FALSE_REJECTION_RATE, 1 / (told + 1))
                rejection = {"unknown_label": UNKNOWN, "false_rejection_rate": rate}
            classifier = SimpleCNAPSClassifier(self.start, device=self.device, **rejection)
            classifier.fit(images, names)
        self.classifier, self.images, self.names = classifier, images, names

    def ask(self, file: str) -> Answer:
        """Classify one image file.

        Raises
        ------
        ValueError
            There are fewer than two classes, or the file cannot be read; the message names it.
        """
        if self.classifier is None:
            raise ValueError("There must be two classes at least before a picture can be classified.")
        picture = read_or_reason(file, self.image_size)
        if isinstance(picture, str):
            raise ValueError(_listed({Path(file).name: picture}))
        classifier = self.classifier
        said = predict_all(classifier, [picture])
        (row,), names = said.probabilities, [str(label) for label in classifier.classes_]
        probabilities = dict(zip(names, row.tolist(), strict=True))
        near = self._neighbours(classifier, said.features)
        return Answer(names[int(row.argmax())], bool(said.unknown[0]), probabilities, picture, near)

    def _neighbours(self, classifier: SimpleCNAPSClassifier, query: NDArray[np.float32]) -> list[Neighbour]:
        """The support images whose features are nearest to those of the query, (1, d)."""
        support = classifier.task_.support_features.cpu().numpy()
        distances = np.linalg.norm(support - query, axis=1)
        labels = classifier.classes_[classifier.task_.support_labels.cpu().numpy()]
        first = len(support) - len(self.images)  # the images of a model file come before
        return [
            Neighbour(str(labels[i]), float(distances[i]), self.images[i - first] if i >= first else None)
            for i in distances.argsort(kind="stable")[:_NEIGHBOURS]
        ]

    def save(self) -> Path | None:
        """Write the classifier to a file of this bench; None where there is none yet."""
        if self.classifier is None:
            return None
        path = Path(self._folder.name, "classifier.safetensors")
        self.classifier.save(path)
        return path


def make_page(start: SimpleCNAPS | SimpleCNAPSClassifier, *, device: str = "auto") -> gr.Blocks:
    """Make the page; every visitor has a bench of their own.

    Parameters
    ----------
    start : SimpleCNAPS or SimpleCNAPSClassifier
        See :class:`Bench`.
    device : str

    Returns
    -------
    gradio.Blocks
        To be launched by :func:`serve`.
    """
    first = Bench(start, device)
    # Uploads and model files older than a day are deleted every hour, and all of them at the end.
    with gr.Blocks(title="Few-shot classifier", analytics_enabled=False, delete_cache=(3600, 86400)) as page:
        bench_of_visitor = gr.State(None)  # made when first needed: an initial value would be copied, network and all
        gr.Markdown(
            "# Few-shot classifier\n"
            "Name a class, choose a few pictures of it, add them; then the next class. Two classes are enough to "
            "begin, five pictures of each are a good start. Pictures stay on the machine that runs this page."
        )
        with gr.Row():
            with gr.Column(min_width=300):
                gr.Markdown("## Teach")
                name = gr.Textbox(label="Class", placeholder="its name", elem_id="class-name", max_lines=1)
                files = gr.File(label="Pictures of the class", file_count="multiple", height=150, elem_id="class-files")
                add = gr.Button("Add to the class", variant="primary", elem_id="add")
                classes = gr.HTML(_classes(first), elem_id="classes")
                download = gr.DownloadButton(
                    "Download the model",
                    value=first.save(),
                    visible=first.classifier is not None,
                    elem_id="download",
                )
                with gr.Row():
                    removed = gr.Dropdown([], label="Class to remove", visible=False, scale=3, elem_id="removed")
                    remove = gr.Button("Remove", visible=False, scale=1, min_width=100, elem_id="remove")
            with gr.Column(min_width=300):
                gr.Markdown("## Ask")
                query = gr.File(label="A picture to classify", height=150, elem_id="query")
                classify = gr.Button("Classify", variant="primary", elem_id="classify")
                answer = gr.HTML(elem_id="answer")
                probabilities = gr.Label(
                    label="Probabilities", num_top_classes=5, show_heading=False, visible=False, elem_id="probabilities"
                )
                neighbours = gr.HTML(elem_id="neighbours")

        def shown(bench: Bench, problem: str = "") -> tuple[Any, ...]:
            added = sorted(set(bench.names))
            return (
                bench,
                _classes(bench, problem),
                gr.Dropdown(added, value=None, visible=bool(added)),
                gr.Button(visible=bool(added)),
                gr.DownloadButton(value=bench.save(), visible=bench.classifier is not None),
            )

        def on_add(bench: Bench | None, name: str, files: list[str] | None) -> tuple[Any, ...]:
            bench = bench or Bench(start, device)
            try:
                problems = bench.add(name, files or [])
            except ValueError as error:
                return gr.skip(), gr.skip(), bench, _classes(bench, str(error)), *[gr.skip()] * 3
            return "", None, *shown(bench, f"Left out: {_listed(problems)}" if problems else "")

        def on_remove(bench: Bench | None, name: str | None) -> tuple[Any, ...]:
            bench = bench or Bench(start, device)
            if name is None:
                return shown(bench, "Choose the class to remove first.")
            bench.remove(name)
            return shown(bench)

        def on_classify(bench: Bench | None, file: str | None) -> tuple[Any, ...]:
            bench = bench or Bench(start, device)
            try:
                if file is None:
                    raise ValueError("Choose a picture first.")
                found = bench.ask(file)
            except ValueError as error:
                return bench, _problem(str(error)), gr.Label(visible=False), ""
            return bench, _answer(found), gr.Label(found.probabilities, visible=True), _neighbours(found)

        # One fit or prediction at a time, whoever asks: the network takes every core.
        at_a_time: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1, "api_visibility": "private"}
        taught = [bench_of_visitor, classes, removed, remove, download]
        gr.on([add.click, name.submit], on_add, [bench_of_visitor, name, files], [name, files, *taught], **at_a_time)
        remove.click(on_remove, [bench_of_visitor, removed], taught, **at_a_time)
        asked = [bench_of_visitor, answer, probabilities, neighbours]
        classify.click(on_classify, [bench_of_visitor, query], asked, **at_a_time)
    return page


def serve(
    page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False, wait: bool = True
) -> str:
    """Serve the page.

    Parameters
    ----------
    page : gradio.Blocks
        From :func:`make_page`.
    host : str
        The address to listen at: "0.0.0.0" lets other machines of the network in.
    port : int, optional
        Default: the first that is free from 7860 on.
    share : bool
        Also make a public address, through a server of Gradio's.
    wait : bool
        Return only when the server is stopped.

    Returns
    -------
    str
        The address of the page.

    Raises
    ------
    OSError
        The port is taken.
    """
    _, local, public = page.launch(
        server_name=host,
        server_port=port,
        share=share,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
        theme=gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]).set(
            button_primary_background_fill="*primary_600",
            button_primary_background_fill_hover="*primary_700",
        ),
        css=_CSS,
        footer_links=[],
        run_history=False,  # which the browser would keep
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    if wait:
        print(f"The app is at {public or local}. Ctrl+C stops it.", flush=True)
        page.block_thread()
    return public or local


def _labels_like(classes: NDArray[Any], names: Sequence[str]) -> list[Any]:
    """Names as labels of the type that a fitted classifier has."""
    known = {str(label): label for label in classes.tolist()}
    if all(isinstance(label, str) for label in known.values()):
        return list(names)
    try:
        return [known[name] if name in known else int(name) for name in names]
    except ValueError as error:
        raise ValueError("The classes of this model are numbers: name new ones by whole numbers.") from error


# ---------------------------------------------------------------------- words, as HTML


def _listed(problems: dict[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in problems.items())


def _problem(text: str) -> str:
    return f'<div class="said problem" role="alert">{escape(text)}</div>' if text else ""


def _picture(picture: NDArray[np.uint8] | None, label: str) -> str:
    """An image element; a grey square where there is no picture."""
    file = io.BytesIO()
    Image.fromarray(np.full((84, 84, 3), 128, np.uint8) if picture is None else picture).save(file, "JPEG", quality=90)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="picture of {escape(label)}" src="data:image/jpeg;base64,{data}">'


def _pictures(pictures: Iterable[tuple[NDArray[np.uint8] | None, str, str]]) -> str:
    """A grid of pictures, each with its label and what stands below it."""
    figures = (
        f"<figure>{_picture(picture, label)}<figcaption>{escape(caption)}</figcaption></figure>"
        for picture, label, caption in pictures
    )
    return f'<div class="pictures">{"".join(figures)}</div>'


def _classes(bench: Bench, problem: str = "") -> str:
    counts = bench.counts()
    state = (
        "No class yet." if not counts else "Add a second class." if bench.classifier is None else "Ready to classify."
    )
    parts = [_problem(problem), f'<div class="said state" role="status">{state}</div>']
    for name, count in counts.items():
        own = [(image, name, "") for image, other in zip(bench.images, bench.names, strict=True) if other == name]
        parts.append(f'<div class="said"><b>{escape(name)}</b> {count}</div>{_pictures(own) if own else ""}')
    return "".join(parts)


def _answer(answer: Answer) -> str:
    if answer.unknown:
        head = UNKNOWN
        text = f"It is farther from every class than their own pictures are. The nearest is {escape(answer.label)}."
    else:
        head, text = escape(answer.label), f"with probability {answer.probabilities[answer.label]:.0%}"
    picture = _picture(answer.picture, "what is asked about")
    return f'<div class="answer">{picture}<div class="said" role="status"><strong>{head}</strong><br>{text}</div></div>'


def _neighbours(answer: Answer) -> str:
    near = ((picture, label, f"{label}, {distance:.1f}") for label, distance, picture in answer.neighbours)
    return f'<div class="said">Nearest pictures it learned from, and their distance</div>{_pictures(near)}'
