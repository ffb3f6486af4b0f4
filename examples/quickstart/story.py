"""What happens in the demo, scene by scene, and what each scene proves.

Nothing here waits for a fixed time: each scene goes on when what it waits for can be seen.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.units import MIB
from examples.quickstart.losses import Losses, first_difference
from examples.quickstart.node import RANKS, Node, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import TypeVar

    from rich.console import Console

    from ckpt_tiering.agent.protocol import SaveStatus
    from examples.quickstart.weed import S3Server

    T = TypeVar("T")

__all__ = ["MIN_COMPARED", "Plan", "ProofError", "Story", "Tale"]

MIN_COMPARED = 20
PART_BYTES = 5 * MIB
_SCENE_WITHIN_S = 180.0
_POLL_S = 0.05
# One line in the user's script is all; what is odd about a demo is said around it.
SETTINGS = {
    "CKPT_TIERING_PART_BYTES": "5MiB",  # several parts even in a small checkpoint
    "CKPT_TIERING_LINGER": "30s",  # should the demo be killed, its agents don't stay for an hour
    "CKPT_TIERING_DRAIN_TIMEOUT": "60s",
}
SLOW_NETWORK = {
    "CKPT_TIERING_MAX_BANDWIDTH": "12MiB",  # a second: an upload takes long enough to be hit
    "CKPT_TIERING_CONCURRENCY": "2",
}
_TOLD = {
    "staged": "step {step} is on NVMe; training goes on",
    "durable": "step {step} is durable, {snapshot_to_durable_seconds:.1f} s after its snapshot",
    "agent_lost": "the trainer's watcher: the agent is gone ({error})",
    "agent_restarted": "the trainer has started another agent",
    "restored": "step {step} is back; files from the bucket: {from_store}, from NVMe: {from_nvme}; "
    "every byte was verified",
    "corrupt": "[red]corrupt: {error}[/]",
    "failed": "[red]step {step} failed: {error}[/]",
    "retry_storm": "[yellow]step {step} is tried again: {error}[/]",
}


class ProofError(Exception):
    """Something that the demo promises was not so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long a story is: steps to train, steps between saves, samples of a batch."""

    steps: int = 60
    save_every: int = 10
    batch_size: int = 20

    def arguments(self) -> list[str]:
        """Return the arguments of the training script."""
        options = {
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--batch-size": self.batch_size,
        }
        return [text for name, value in options.items() for text in (name, str(value))]


@dataclass(slots=True, kw_only=True)
class Tale:
    """What happened: all that the table, the drawing and the tests need. Times since the epoch."""

    reference: Losses = field(default_factory=dict)
    first: Record | None = None
    second: Record | None = None
    killed_step: int = -1
    killed_at: float = 0.0
    restarted_at: float = 0.0
    lost_at: float = 0.0
    resumed_step: int = -1


@dataclass(frozen=True, slots=True)
class _Upload:
    """A multipart upload as the store sees it: stamp and ETag of each part that it has."""

    save: SaveStatus
    key: str
    upload_id: str
    parts: Mapping[int, tuple[Any, str]]

    @property
    def num_parts(self) -> int:
        return -(-self.save.total_bytes // PART_BYTES)


class Story:
    """Tells it. Blocks until the end.

    Args:
        server: The S3 server; ``AWS_*`` in the environment must lead to it.
        work: Directory for the disks of all nodes.
        plan: How long it is.
        console: Where it is told.
    """

    def __init__(self, server: S3Server, work: Path, plan: Plan, console: Console) -> None:
        self._client = server.client()
        self._bucket = server.new_bucket()
        self.store = f"s3://{self._bucket}/quickstart"
        self._work, self._plan, self._console = work, plan, console
        self._clock = SystemClock()
        self._began = self._clock.monotonic()
        # Somebody else, who knows nothing but the URL: reads the bucket, has no agent.
        self.witness = TieredCheckpointer(self.store, staging=work / "witness")
        self._tale = Tale()

    def tell(self) -> Tale:
        """Play all scenes.

        Raises:
            ProofError: A promise was broken, or a job failed; says which.
        """
        self._reference()
        with ExitStack() as nodes:
            first = nodes.enter_context(Node(self._work / "node-1"))
            self._train_on_node_1(first)
            self._kill_the_agent(first)
            self._lose_the_node(first)
            second = nodes.enter_context(Node(self._work / "node-2"))
            self._resume_on_node_2(second)
            self._tale.second = second.record()
        self._compare()
        return self._tale

    def resume_elsewhere(self, node: Node, reference: str, *, steps: int) -> None:
        """Train on another node from some checkpoint to step ``steps``, without a store."""
        arguments = [*self._plan.arguments(), "--resume", reference, "--steps", str(steps)]
        node.start(arguments)
        self._finish(node)

    # --- the scenes --------------------------------------------------------------------------

    def _reference(self) -> None:
        self._scene(
            1,
            "What should come out",
            f"plain Lightning, no ckpt-tiering: {self._plan.steps} steps on {RANKS} ranks (DDP), "
            "never interrupted",
        )
        with Node(self._work / "reference") as node:
            node.start(self._plan.arguments())
            self._finish(node)
            self._tale.reference = node.losses()
        last = self._plan.steps - 1
        losses = [float.fromhex(self._tale.reference[0][s].exact) for s in (0, last)]
        self._say(f"done: the loss on rank 0 went from {losses[0]:.2f} to {losses[1]:.2f}")

    def _train_on_node_1(self, node: Node) -> None:
        self._scene(
            2,
            "The same script, with the one line",
            f"a checkpoint every {self._plan.save_every} steps to {self.store}, through a network "
            "held down to 12 MiB/s",
        )
        node.start(self._arguments(node), SETTINGS | SLOW_NETWORK)
        self._until(node, lambda: bool(node.durable_steps()), "a first save to be durable")
        self._quote(node, "starting from scratch")
        self._prove(self.witness.latest() is not None, "a first save is durable")

    def _kill_the_agent(self, node: Node) -> None:
        self._scene(
            3,
            "SIGKILL to the uploader, in the middle of an upload",
            "waiting until the store has some parts of the next checkpoint, but not all",
        )
        before = self._until(node, lambda: self._half_sent(node), "an upload to be half done")
        self._tale.killed_at = self._clock.now()
        node.kill_agent()
        step = self._tale.killed_step = before.save.step
        hit = self._parts(before)
        if hit is None:
            raise ProofError("the kill came too late: the upload was complete")
        self._say(
            f"[red]killed[/] while the store had {len(hit.parts)} of {hit.num_parts} parts of "
            f"step {step}"
        )
        latest = self.witness.latest()
        self._prove(
            latest is not None and latest.step < step,
            f"half a checkpoint is no checkpoint: the bucket's newest is still step "
            f"{latest.step if latest else None}",
        )
        seen = [hit]

        def recovered() -> bool:
            now = self._parts(hit)
            if now is not None:
                seen.append(now)
            reported = any(e["kind"] == "agent_restarted" for e in node.events())
            return reported and step in node.durable_steps()

        self._until(node, recovered, f"step {step} to be durable all the same")
        at = {event["kind"]: event["at"] for event in node.events()}  # the last of each kind
        self._tale.restarted_at = at["agent_started"]
        self._prove(
            self._tale.killed_at < at["agent_lost"] < at["agent_restarted"]
            and self._tale.killed_at < self._tale.restarted_at,
            "the trainer noticed and started another agent, which finished the upload",
        )
        self._prove_kept(hit, seen)

    def _prove_kept(self, hit: _Upload, seen: list[_Upload]) -> None:
        """Compare what the store said of an upload at the kill with what it said until the end."""
        if not all(upload.parts.get(n) == p for upload in seen for n, p in hit.parts.items()):
            raise ProofError("parts that the store had were sent again, or went away")
        if len(seen[-1].parts) == len(hit.parts):
            self._say("the rest went too fast to see whether a part was sent again")
            return
        self._prove(
            True,
            f"parts {sorted(hit.parts)}, which the store had, were not sent again: same time "
            f"stamps when it had {sorted(seen[-1].parts)}",
        )

    def _lose_the_node(self, node: Node) -> None:
        self._scene(
            4,
            "The node is lost",
            "with a save half sent: SIGKILL to launcher, ranks and agent; its disk is deleted",
        )
        after = self._tale.killed_step

        last_chance = self._plan.steps - MIN_COMPARED - self._plan.save_every

        def something_to_lose() -> bool:
            durable = max(node.durable_steps())
            # On an odd machine better nothing to lose than too little left to compare.
            late = durable > last_chance or node.exit_code is not None
            return durable > after and (late or self._half_sent(node) is not None)

        self._until(node, something_to_lose, "another durable save, and one on its way")
        self._tale.lost_at = self._clock.now()
        record = self._tale.first = node.lose()
        trained = min(max(steps) for steps in record.losses.values()) + 1
        pending = [step for step, save in record.saves.items() if save.durable_at is None]
        latest = self.witness.latest()
        if latest is None:
            raise ProofError("the bucket has no checkpoint any more")
        self._tale.resumed_step = latest.step
        self._say(
            f"[red]lost[/] at step {trained}; gone with it: "
            + (f"what was staged of steps {pending}" if pending else "no save: all were durable")
        )
        self._prove(
            not node.directory.exists() and latest.step > after,
            f"all that is left is the bucket, and its newest checkpoint is step {latest.step}",
        )

    def _resume_on_node_2(self, node: Node) -> None:
        self._scene(
            5,
            "The same command on a fresh node",
            'new processes, an empty disk, ckpt_path="last"',
        )
        node.start(self._arguments(node), SETTINGS)
        self._finish(node)
        self._quote(node, "Restor")
        step = self._tale.resumed_step
        restored = [e for e in node.events() if e["kind"] == "restored"]
        self._prove(
            {e["step"] for e in restored} == {step} and any(e["from_store"] for e in restored),
            f"it went on from step {step}, which came from the bucket",
        )
        due = range(self._plan.save_every, self._plan.steps + 1, self._plan.save_every)
        durable = sorted(save.step for save in self.witness.saves())
        self._prove(set(due) <= set(durable), f"every save of the run is durable: steps {durable}")

    def _compare(self) -> None:
        self._scene(6, "The proof", "losses of every rank and step, compared to the last bit")
        tale = self._tale
        assert tale.first is not None
        assert tale.second is not None
        self._prove_equal(tale.first.losses, "before the loss of the node", at_least=1)
        self._prove_equal(tale.second.losses, "after resuming", at_least=MIN_COMPARED)

    def _prove_equal(self, losses: Losses, when: str, *, at_least: int) -> None:
        wrong = first_difference(losses, self._tale.reference)
        if wrong is not None:
            raise ProofError(f"losses {when} are not those of the uninterrupted run: {wrong}")
        steps = min(len(steps) for steps in losses.values())
        first = min(min(steps) for steps in losses.values())
        self._prove(
            steps >= at_least,
            f"{when}, steps {first} to {first + steps - 1}: {steps} losses on each of {RANKS} "
            "ranks equal those of the uninterrupted run, bit for bit",
        )

    # --- what the store has ------------------------------------------------------------------

    def _half_sent(self, node: Node) -> _Upload | None:
        """Find an upload of which the store has some parts, and lacks more than one."""
        if not node.durable_steps():
            return None
        saves = {s.save_id: s for s in node.saves().values() if s.state == "staged"}
        listing = self._client.list_multipart_uploads(Bucket=self._bucket)
        for found in listing.get("Uploads", []):
            key = found["Key"]
            save = next((s for save_id, s in saves.items() if save_id in key), None)
            if save is not None:
                upload = self._parts(_Upload(save, key, found["UploadId"], {}))
                if upload is not None and 0 < len(upload.parts) < upload.num_parts - 1:
                    return upload
        return None

    def _parts(self, upload: _Upload) -> _Upload | None:
        """Look at an upload anew; None if it is open no more."""
        try:
            listing = self._client.list_parts(
                Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id
            )
        except self._client.exceptions.NoSuchUpload:
            return None
        parts = {p["PartNumber"]: (p["LastModified"], p["ETag"]) for p in listing.get("Parts", [])}
        return _Upload(upload.save, upload.key, upload.upload_id, parts)

    # --- telling -----------------------------------------------------------------------------

    def _arguments(self, node: Node) -> list[str]:
        return ["--store", self.store, "--staging", str(node.staging), *self._plan.arguments()]

    def _finish(self, node: Node) -> None:
        self._until(node, lambda: node.exit_code == 0, "the job to end")
        node.page()

    def _until(self, node: Node, condition: Callable[[], T | None], what: str) -> T:
        """Wait until ``condition`` holds, and return its value; tell what happens meanwhile."""
        deadline = self._clock.monotonic() + _SCENE_WITHIN_S
        with self._console.status(f"{node.name}: waiting for {what}"):
            while True:
                value = condition()
                for event in node.news():
                    self._report(node, event)
                if value:
                    return value
                if node.exit_code is not None and node.exit_code != 0:
                    raise ProofError(f"the job on {node.name} failed:\n{node.log_tail()}")
                if self._clock.monotonic() > deadline:
                    raise ProofError(
                        f"waited {_SCENE_WITHIN_S:.0f} s for {what}, in vain:\n{node.log_tail()}"
                    )
                self._clock.sleep(_POLL_S)

    def _report(self, node: Node, event: dict[str, Any]) -> None:
        if event["kind"] in _TOLD:
            self._say(f"[dim]{node.name}:[/] {_TOLD[event['kind']].format(**event)}")

    def _quote(self, node: Node, words: str) -> None:
        line = next((li for li in node.log().splitlines() if words in li), None)
        if line is not None:
            self._say(f"[dim]{node.name}, in the trainer's own log:[/] [italic]{escape(line)}[/]")

    def _say(self, text: str) -> None:
        at = self._clock.monotonic() - self._began
        line = Table.grid(padding=(0, 2))  # so that long lines are wrapped within their column
        line.add_row(f"[dim]{at:5.1f} s[/]", text)
        self._console.print(line, highlight=False)

    def _scene(self, number: int, title: str, text: str) -> None:
        self._console.print(f"\n[bold cyan]{number}. {title}[/]")
        self._say(text)

    def _prove(self, holds: bool, claim: str) -> None:
        if not holds:
            raise ProofError(f"this does not hold: {claim}")
        self._say(f"[bold green]✔[/] {claim}")
