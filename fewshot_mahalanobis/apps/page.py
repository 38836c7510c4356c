"""The app: a page in the browser to teach a classifier and to ask it (the extra ``app``).

:class:`~fewshot_mahalanobis.apps.session.Session` is what the page does, :func:`make_page` the page, :func:`serve` its
server.
Everything stays on the machine that runs it: no telemetry, no font or script from elsewhere, nothing sent unless
``share`` asks for it.
"""

from __future__ import annotations

import base64
import io
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from typing import Any

from PIL import Image

from fewshot_mahalanobis.apps.session import Answer, Neighbour, Picture, Session
from fewshot_mahalanobis.classifier import SimpleCNAPSClassifier
from fewshot_mahalanobis.extras import install_command
from fewshot_mahalanobis.networks.simple_cnaps import SimpleCNAPS
from fewshot_mahalanobis.support_set.learning_curve import LearningCurve

try:
    import gradio as gr
except ImportError as error:
    raise ImportError(f"the app needs Gradio: {install_command('app')}") from error

__all__ = ["make_page", "serve", "start_server"]

#: Probabilities that are shown of an answer, largest first.
_BARS = 5
#: Answers that are shown at a time.
_SHOWN = 24
#: Classes that can be pressed for an answer, its most probable ones; the others are typed.
_CHOICES = 4
#: Seconds after which uploads, and sessions that nobody has opened, are deleted.
_DAY = 86_400
#: What pictures of no class are called here.
_NONE = "none of these"
#: One grey pixel, a GIF file.
_GREY = base64.b64decode("R0lGODlhAQABAIAAAICAgAAAACwAAAAAAQABAAACAkQBADs=")
_CSS = """
.gradio-container {max-width: 1100px !important; margin: auto; overflow: clip !important}
.said {font-size: var(--text-lg); line-height: 1.5; overflow-wrap: anywhere}
.problem {border-left: 4px solid var(--error-border-color); padding-left: .8em; margin-bottom: .8em}
.pictures {display: grid; grid-template-columns: repeat(auto-fill, minmax(72px, 1fr)); gap: .5em; margin: .3em 0 1em}
.pictures figure {margin: 0; text-align: center; font-size: var(--text-sm); overflow-wrap: anywhere}
.pictures img {width: 100%}
.pictures img, .answer img {
    aspect-ratio: 1; border-radius: var(--radius-md); outline: 1px solid var(--border-color-primary); display: block
}
.answers {display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15.5rem), 1fr)); gap: .6em}
.answer {padding: .6em; border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg)}
.answer:has(details[open]) {grid-column: 1 / -1}
.answer header {display: flex; gap: .8em; align-items: center}
.answer header img {width: 112px}
.answer strong {font-size: var(--text-xl)}
.answer summary {cursor: pointer; font-size: var(--text-sm); text-decoration: underline}
.choices {display: flex; flex-wrap: wrap; gap: .3em; margin: .5em 0 .3em}
.choices button, .choices input {
    max-width: 100%; padding: .15em .6em; border: 1px solid var(--border-color-primary); border-radius: 1em;
    font-weight: 400;
    background: var(--background-fill-secondary); color: var(--body-text-color); font-size: var(--text-sm)
}
.choices button {overflow: hidden; text-overflow: ellipsis; white-space: nowrap}
.choices button:hover {border-color: var(--primary-600)}
.choices button[aria-pressed=true] {
    background: var(--primary-600); border-color: var(--primary-600); color: white; font-weight: 600
}
.choices input {flex: 1 1 5em; min-width: 0; width: 5em; max-width: 14em}
.choices input::placeholder {color: var(--body-text-color-subdued)}
.choices :focus-visible {outline: 2px solid var(--primary-500); outline-offset: 1px}
#exported {display: none}
#learning {
    position: sticky; bottom: 0; z-index: 5; align-items: center; padding: .5em 0;
    background: var(--body-background-fill)
}
.bar {display: grid; grid-template-columns: 8em 1fr 3em; gap: .6em; align-items: center; margin: .2em 0}
.bar span {overflow: hidden; text-overflow: ellipsis; white-space: nowrap}
.bar span:last-child {text-align: right}
.bar div {height: .6em; border-radius: .3em; background: var(--border-color-primary)}
.bar div div {background: var(--primary-500)}
.probabilities {margin: .8em 0}
.class {display: inline-block; padding: .2em .7em; margin: 0 .4em .4em 0; border-radius: 1em;
    border: 1px solid var(--border-color-primary)}
.enough {display: flex; flex-wrap: wrap; gap: .4em 1.2em; align-items: center; margin: .4em 0 1em}
.enough svg {width: 220px; flex: none; fill: none; stroke: currentColor}
.enough text {fill: currentColor; stroke: none; font-size: 10px}
.enough div {flex: 1 1 18em}
#gallery {height: auto; min-height: 0}
#gallery .grid-wrap {height: auto; min-height: 0; max-height: 60vh; overflow-y: auto}
#gallery .grid-container {
    grid-template: none / repeat(auto-fill, minmax(84px, 1fr)) !important; grid-auto-rows: auto !important
}
"""


#: Presses of a label, once more to take it back, and names that are typed go to the server.
_SCRIPT = """
const say = (control, label) => trigger("input", {
    picture: Number(control.closest(".answer").dataset.picture), label, typed: control.matches("input")
});
element.addEventListener("click", event => {
    const pressed = event.target.closest("button[data-label]");
    if (!pressed) return;
    const on = pressed.ariaPressed !== "true";
    for (const button of pressed.parentElement.querySelectorAll("button")) button.ariaPressed = "false";
    pressed.ariaPressed = String(on);
    say(pressed, on ? pressed.dataset.label : null);
});
element.addEventListener("keydown", event => {
    if (event.key === "Enter" && event.target.matches("input")) say(event.target, event.target.value);
});
"""


def make_page(start: SimpleCNAPS | SimpleCNAPSClassifier, *, device: str = "auto") -> gr.Blocks:
    """Make the page; every browser has a session of its own, which a reload finds again.

    Parameters
    ----------
    start : SimpleCNAPS or SimpleCNAPSClassifier
        See :class:`~fewshot_mahalanobis.apps.session.Session`.
    device : str

    Returns
    -------
    gradio.Blocks
        To be launched by :func:`serve`.
    """
    sessions = _Sessions(lambda: Session(start, device))

    def session_of(session: Session | None) -> Session:
        """The visitor's own session, made when first needed: an initial value would be copied, network and all."""
        return Session(start, device) if session is None else session

    # Uploads and model files older than a day are deleted every hour, and all of them at the end.
    with gr.Blocks(title="Few-shot classifier", analytics_enabled=False, delete_cache=(3600, _DAY)) as page:
        visitor, chosen, first_shown = gr.State(None), gr.State(None), gr.State(0)
        browser = gr.BrowserState(None, storage_key="fewshot-mahalanobis-session", secret="a name that tells nothing")
        gr.Markdown(
            "# Few-shot classifier\n"
            "Teach classes by a few pictures each, five are a good start; then drop other pictures and see which class "
            "they are of. Pictures stay on the machine that runs this page."
        )
        with gr.Row():
            with gr.Column(min_width=300):
                gr.Markdown("## Teach")
                name = gr.Textbox(label="Class", placeholder="its name", elem_id="class-name", max_lines=1)
                files = gr.File(label="Pictures of the class", file_count="multiple", height=130, elem_id="class-files")
                photo = _camera("Camera", "class-camera")
                with gr.Row():
                    add = gr.Button("Add to the class", variant="primary", elem_id="add", min_width=140)
                    add_none = gr.Button("Add as none of these", elem_id="add-none", min_width=140)
                example = gr.Button("Try an example", elem_id="example")
                state = gr.HTML(elem_id="state", padding=False)
            with gr.Column(min_width=300):
                gr.Markdown("## Ask")
                query = gr.File(label="Pictures to classify", file_count="multiple", height=130, elem_id="query")
                shot = _camera("Camera", "query-camera")
                asked = gr.HTML(elem_id="asked", padding=False)
        with gr.Column(visible=False, elem_id="answered") as answered:
            gr.Markdown(
                "## Answers\n"
                "Press what a picture is, wrong answers above all, on as many as you like; then *Learn*. Those whose "
                "label would teach most come first."
            )
            answers = gr.HTML(elem_id="answers", padding=False, js_on_load=_SCRIPT)
            with gr.Row(visible=False, elem_id="turn") as turn:
                earlier = gr.Button("Previous pictures", elem_id="earlier", min_width=100)
                later = gr.Button("Next pictures", elem_id="later", min_width=100)
            with gr.Row(visible=False, elem_id="learning") as learning:
                marked = gr.HTML(elem_id="marked", padding=False)
                learn = gr.Button("Learn", variant="primary", elem_id="learn", min_width=140)
            clear = gr.Button("Clear the answers", elem_id="clear")
        with gr.Column(visible=False, elem_id="taught") as taught:
            gr.Markdown("## What it has learned from")
            classes = gr.HTML(elem_id="classes", padding=False)
            gallery = gr.Gallery(
                show_label=False, columns=8, height="auto", object_fit="cover", allow_preview=False,
                interactive=False, buttons=[], elem_id="gallery",
            )  # fmt: skip
            with gr.Row(visible=False) as removal:
                remove_picture = gr.Button("Remove this picture", elem_id="remove-picture")
                remove_class = gr.Button("Remove the class", elem_id="remove-class")
            with gr.Row():
                download = gr.DownloadButton("Download the model", visible=False, elem_id="download")
                export = gr.Button("Export as a web page", visible=False, elem_id="export")
            exported = gr.DownloadButton(elem_id="exported")  # which the page itself presses

        def shown(session: Session, taught_problem: str = "", ask_problem: str = "") -> dict[Any, Any]:
            """What every part of the page shows."""
            counts, own = session.counts(), session.pictures()
            path = session.save()
            return {
                visitor: session,
                chosen: None,
                state: _state(session, taught_problem),
                asked: _asked(session, ask_problem),
                answered: gr.Column(visible=bool(session.answers)),
                **answers_shown(session, 0),
                turn: gr.Row(visible=len(session.answers) > _SHOWN),
                taught: gr.Column(visible=bool(counts) or bool(own)),
                classes: _classes(counts, session.count_of_none(), session.curve),
                gallery: gr.Gallery(
                    [(_opened(picture), _named(session, label)) for _, picture, label in own], visible=bool(own)
                ),
                removal: gr.Row(visible=False),
                download: gr.DownloadButton(value=path, visible=path is not None),
                export: gr.Button(visible=path is not None),
            }

        def answers_shown(session: Session, place: int, problem: str = "") -> dict[Any, Any]:
            return {answers: _answers(session, place), first_shown: place, **marks_shown(session, problem)}

        def marks_shown(session: Session, problem: str = "") -> dict[Any, Any]:
            """How many pictures are marked; below a problem, if there is one."""
            return {
                marked: _marked(session, problem),
                learning: gr.Row(visible=bool(session.marks) or bool(problem)),
                learn: gr.Button(visible=bool(session.marks)),
            }

        def on_load(name: str | None) -> dict[Any, Any]:
            name, session = sessions.of(name)
            return {browser: name, **shown(session)}

        def on_export(session: Session | None) -> dict[Any, Any]:
            session = session_of(session)
            try:
                return {exported: session.export_page(), state: _state(session, "")}
            except (ValueError, ImportError) as error:
                return {exported: None, state: _state(session, str(error))}

        def on_add(
            session: Session | None, name_: str | None, files_: list[str] | None, photo_: str | None
        ) -> dict[Any, Any]:
            session = session_of(session)
            try:
                left_out = session.add(
                    session.none if name_ is None else name_, [*(files_ or ()), *([photo_] if photo_ else ())]
                )
            except ValueError as error:
                return {visitor: session, state: _state(session, str(error))}
            return {name: "", files: None, photo: None, **shown(session, taught_problem=_left_out(left_out))}

        def on_example(session: Session | None) -> dict[Any, Any]:
            session = session_of(session)
            try:
                session.add_example()
            except ValueError as error:  # a model file's classes may be numbers
                return {visitor: session, state: _state(session, str(error))}
            return shown(session)

        def on_ask(session: Session | None, given: list[str] | str | None) -> dict[Any, Any]:
            session = session_of(session)
            if not given:
                return {visitor: session}
            try:
                left_out = session.ask([given] if isinstance(given, str) else given)
            except ValueError as error:
                return {visitor: session, query: None, shot: None, asked: _asked(session, str(error))}
            return {query: None, shot: None, **shown(session, ask_problem=_left_out(left_out))}

        def on_turn(session: Session | None, place: int, by: int) -> dict[Any, Any]:
            session = session_of(session)
            return answers_shown(session, max(0, min(place + by, (len(session.answers) - 1) // _SHOWN * _SHOWN)))

        def on_clear(session: Session | None) -> dict[Any, Any]:
            session = session_of(session)
            session.forget_queries()
            return shown(session)

        def on_mark(session: Session | None, place: int, event: gr.EventData) -> dict[Any, Any]:
            session = session_of(session)
            try:
                session.mark(event.picture, event.label)
            except ValueError as error:
                return answers_shown(session, place, str(error))
            # The page itself has marked what was pressed; a name that was typed becomes a choice.
            return answers_shown(session, place) if event.typed else marks_shown(session)

        def on_learn(session: Session | None, place: int) -> dict[Any, Any]:
            session = session_of(session)
            try:
                session.learn()
            except ValueError as error:
                return {visitor: session, **answers_shown(session, place, str(error))}
            return shown(session)

        def on_choose(session: Session | None, event: gr.SelectData) -> dict[Any, Any]:
            session = session_of(session)
            index, _, label = session.pictures()[event.index]
            return {
                chosen: (index, label),
                removal: gr.Row(visible=True),
                remove_class: gr.Button(
                    "Remove all that are none of these" if label == session.none else f"Remove the class “{label}”"
                ),
            }

        def on_remove_picture(session: Session | None, chosen_: tuple[int, str] | None) -> dict[Any, Any]:
            session = session_of(session)
            if chosen_ is not None:
                session.remove_picture(chosen_[0])
            return shown(session)

        def on_remove_class(session: Session | None, chosen_: tuple[int, str] | None) -> dict[Any, Any]:
            session = session_of(session)
            if chosen_ is not None:
                session.remove(chosen_[1])
            return shown(session)

        # One fit or prediction at a time, whoever asks: the network takes every core.
        at_a_time: dict[str, Any] = {"concurrency_id": "network", "concurrency_limit": 1, "api_visibility": "private"}
        parts = [
            *(visitor, chosen, name, files, photo, state, query, shot, asked, answered, answers, first_shown, turn),
            *(learning, marked, learn, taught, classes, gallery, removal, remove_class, download, export),
        ]
        of_answers = [visitor, answers, first_shown, learning, marked, learn]
        to_answers = "() => document.querySelector('#answered').scrollIntoView()"
        for button, by in ((later, _SHOWN), (earlier, -_SHOWN)):
            turned = button.click(partial(on_turn, by=by), [visitor, first_shown], of_answers, **at_a_time)
            turned.success(None, js=to_answers)
        gr.on([add.click, name.submit], on_add, [visitor, name, files, photo], parts, **at_a_time)
        add_none.click(on_add, [visitor, gr.State(None), files, photo], parts, **at_a_time)
        example.click(on_example, visitor, parts, **at_a_time)
        query.upload(on_ask, [visitor, query], parts, **at_a_time)
        shot.input(on_ask, [visitor, shot], parts, **at_a_time)
        clear.click(on_clear, visitor, parts, **at_a_time)
        answers.input(
            on_mark, [visitor, first_shown], of_answers, trigger_mode="multiple", show_progress="hidden", **at_a_time
        )
        learn.click(on_learn, [visitor, first_shown], parts, **at_a_time).success(None, js=to_answers)
        gallery.select(on_choose, visitor, parts, **at_a_time)
        remove_picture.click(on_remove_picture, [visitor, chosen], parts, **at_a_time)
        remove_class.click(on_remove_class, [visitor, chosen], parts, **at_a_time)
        # The file is there before the browser is told to fetch it.
        export.click(on_export, visitor, [exported, state], **at_a_time).success(
            None, js="() => setTimeout(() => document.querySelector('#exported').click(), 200)"
        )
        page.load(on_load, browser, [browser, *parts], **at_a_time)
    return page


class _Sessions:
    """The sessions of browsers, which know theirs by a name; those that nobody has opened for a day are forgotten."""

    def __init__(self, new: Callable[[], Session]) -> None:
        self._new = new
        self._opened: dict[str, tuple[float, Session]] = {}

    def of(self, name: str | None) -> tuple[str, Session]:
        """The name and the session of a browser that says this name, new ones if it is not known."""
        now = time.monotonic()
        self._opened = {other: kept for other, kept in self._opened.items() if now - kept[0] < _DAY}
        if name not in self._opened:
            name = secrets.token_urlsafe()
        session = self._opened[name][1] if name in self._opened else self._new()
        self._opened[name] = (now, session)
        return name, session


def serve(
    page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False, browser: bool = False
) -> None:
    """Serve the page until Ctrl+C; the parameters and errors are those of :func:`start_server`."""
    address = start_server(page, host=host, port=port, share=share, browser=browser)
    print(f"The app is at {address}. Ctrl+C stops it.", flush=True)
    try:
        while page.is_running:
            time.sleep(0.1)
    finally:
        page.close(verbose=False)


def start_server(
    page: gr.Blocks, *, host: str = "127.0.0.1", port: int | None = None, share: bool = False, browser: bool = False
) -> str:
    """Start the page's server, which runs until ``page.close()``.

    Parameters
    ----------
    page : gradio.Blocks
        From :func:`make_page`.
    host : str
        The address to listen at: "0.0.0.0" lets other machines of the network in.
    port : int, optional
        Default: the first free one from 7860 on.
    share : bool
        Also make a public address, through Gradio's server.
    browser : bool
        Open the page in the browser of this machine.

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
        inbrowser=browser,
        quiet=True,
        show_error=True,
        prevent_thread_lock=True,
        theme=gr.themes.Default(primary_hue="blue", font=["system-ui", "sans-serif"], font_mono=["monospace"]).set(
            button_primary_background_fill="*primary_600", button_primary_background_fill_hover="*primary_700"
        ),
        css=_CSS,
        footer_links=[],
        run_history=False,  # which the browser would keep
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
    )
    return public or local


def _camera(label: str, name: str) -> gr.Image:
    """A camera that is opened when it is wanted."""
    with gr.Accordion(label, open=False, elem_id=f"{name}-box"):
        return gr.Image(
            sources=["webcam"],
            type="filepath",
            show_label=False,
            height=240,
            webcam_options=gr.WebcamOptions(mirror=False),
            elem_id=name,
        )


# ---------------------------------------------------------------------- words, as HTML


def _left_out(problems: Mapping[str, str]) -> str:
    listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    return f"Left out: {listed}" if problems else ""


def _problem(text: str) -> str:
    return f'<div class="said problem" role="alert">{escape(text)}</div>' if text else ""


def _state(session: Session, problem: str) -> str:
    """What to do next, below a problem if there is one."""
    counts = session.counts()
    if session.classifier is None:
        text = "Add a second class, or one more picture of this one." if counts else "No class yet."
    elif len(counts) == 1:
        (name,) = counts
        text = f"Ready to tell “{escape(name)}” from everything else. Add a second class to tell the two apart."
    else:
        text = "Ready to classify."
    return f'{_problem(problem)}<div class="said" role="status">{text}</div>'


def _asked(session: Session, problem: str) -> str:
    """Whether pictures wait, below a problem if there is one."""
    text, number = "", len(session.queries)
    if number and not session.answers:
        waiting = "1 picture waits" if number == 1 else f"{number:,} pictures wait"
        text = f'<div class="said" role="status">{waiting} until a class is taught.</div>'
    return _problem(problem) + text


def _marked(session: Session, problem: str) -> str:
    marks = len(session.marks)
    text = "1 picture has your label." if marks == 1 else f"{marks:,} pictures have your labels."
    return _problem(problem) + (f'<div class="said" role="status">{text}</div>' if marks else "")


def _named(session: Session, label: str) -> str:
    return _NONE if label == session.none else label


def _opened(picture: Picture) -> Image.Image:
    return Image.open(io.BytesIO(picture.thumbnail))


def _picture(picture: Picture | None, label: str) -> str:
    """An image element; a grey square where there is no picture."""
    file, kind = (_GREY, "gif") if picture is None else (picture.thumbnail, "jpeg")
    data = base64.b64encode(file).decode()
    return f'<img alt="picture of {escape(label)}" src="data:image/{kind};base64,{data}">'


def _pictures(neighbours: Iterable[Neighbour]) -> str:
    """A grid of pictures, each with its label and its distance."""
    figures = (
        f"<figure>{_picture(near.picture, near.label)}"
        f"<figcaption>{escape(near.label)}, {near.distance:.1f}</figcaption></figure>"
        for near in neighbours
    )
    return f'<div class="pictures">{"".join(figures)}</div>'


def _answers(session: Session, first: int) -> str:
    """Some answers from the ``first`` on; a single one with its reasons."""
    total, ranked = len(session.answers), session.ranked()[first : first + _SHOWN]
    if not ranked:
        return ""
    place = f'<p class="place">{first + 1:,} to {first + len(ranked):,} of {total:,}</p>' if total > _SHOWN else ""
    names = {name: None for name in (*session.counts(), *session.marks.values()) if name != session.none}
    options = "".join(f'<option value="{escape(name)}"></option>' for name in names)
    listed = f'<datalist id="classes-known">{options}</datalist>'
    shown = "".join(_answer(session, answer, total == 1) for answer in ranked)
    return f'{place}{listed}<div class="answers">{shown}</div>'


def _answer(session: Session, answer: Answer, opened: bool) -> str:
    """One answer; what the user may say it is; when opened, the probabilities and the nearest pictures."""
    if answer.unknown:
        head, text = escape(session.none), f"Unlike the pictures of every class. The nearest is {escape(answer.label)}."
    elif len(answer.probabilities) == 1:
        head, text = escape(answer.label), "Like its pictures."
    else:
        head, text = escape(answer.label), f"{answer.probabilities[answer.label]:.0%} probable"
    picture = _picture(answer.picture, "what is asked about")
    reasons = _bars(answer) + (
        f'<div class="neighbours">Nearest pictures it learned from, and their distance'
        f"{_pictures(session.neighbours(answer))}</div>"
    )
    return (
        f'<article class="answer" data-picture="{answer.picture.number}"><header>{picture}'
        f'<div class="said"><strong>{head}</strong><br>{text}</div></header>{_choices(session, answer)}'
        f"<details{' open' * opened}><summary>Why?</summary>{reasons}</details></article>"
    )


def _choices(session: Session, answer: Answer) -> str:
    """What can be said of a picture by one press, and a field for any other class."""
    said = session.marks.get(answer.picture)
    likely = sorted(answer.probabilities, key=lambda name: -answer.probabilities[name])[:_CHOICES]
    names = [*likely, *([session.none] if session.can_learn_none else [])]
    names += [said] if said is not None and said not in names else []
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(name == said).lower()}" data-label="{escape(name)}">'
        f"{escape(_named(session, name))}</button>"
        for name in names
    )
    other = '<input type="text" list="classes-known" aria-label="another class" placeholder="another">'
    return f'<div class="choices" role="group" aria-label="What is it?">{buttons}{other}</div>'


def _bars(answer: Answer) -> str:
    best = sorted(answer.probabilities.items(), key=lambda item: -item[1])[:_BARS]
    bars = (
        f'<div class="bar"><span>{escape(name)}</span><div><div style="width: {p:.1%}"></div></div>'
        f"<span>{p:.0%}</span></div>"
        for name, p in best
    )
    return f'<div class="probabilities">{"".join(bars)}</div>'


def _classes(counts: Mapping[str, int], of_none: int, curve: LearningCurve | None) -> str:
    """The classes with their numbers of pictures; below them, whether more would help."""
    counts = {**counts, **({_NONE: of_none} if of_none else {})}
    names = "".join(f'<span class="class">{escape(name)} <b>{n}</b></span>' for name, n in counts.items())
    if curve is None:
        return names
    more, (*_, left_out) = curve.usual_count, curve.measured.values()
    text = (
        f"{escape(curve.advice)}<br>Each left out in turn, {left_out:.0%} of the pictures are recognised. Expected on "
        f"new ones: {curve.expected()}, and with {more} more of each class {curve.expected(more)}."
    )
    return f'{names}<div class="enough">{_curve(curve, more)}<div>{text}</div></div>'


def _curve(curve: LearningCurve, more: int) -> str:
    """The curve as a drawing: measured as a line, expected as a dashed one with its interval."""
    now = max(curve.counts.values())
    expected = [(now + extra, curve.expected(extra)) for extra in range(more + 1)]

    def points(pairs: Iterable[tuple[int, float]]) -> str:
        return " ".join(f"{30 + 180 * (m - 1) / (now + more - 1):.1f},{90 - 80 * share:.1f}" for m, share in pairs)

    band = [*((m, e.high) for m, e in expected), *((m, e.low) for m, e in reversed(expected))]
    return (
        '<svg viewBox="0 0 220 108" role="img" aria-label="accuracy by the number of pictures of each class">'
        '<path d="M30 10V90H210" opacity=".4"/>'
        f'<polygon points="{points(band)}" fill="currentColor" stroke="none" opacity=".15"/>'
        f'<polyline points="{points(curve.measured.items())}" stroke-width="2"/>'
        f'<polyline points="{points((m, e.accuracy) for m, e in expected)}" stroke-width="2" stroke-dasharray="4 3"/>'
        '<text x="0" y="14">100%</text><text x="12" y="93">0%</text>'
        f'<text x="30" y="104">1</text><text x="210" y="104" text-anchor="end">{now + more} of a class</text></svg>'
    )
