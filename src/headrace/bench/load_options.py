"""The options that every verb of `headrace bench` shares: which traffic, how much of it, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.base.errors import InvalidInput

if TYPE_CHECKING:  # the command line needs only the options, and must not pay for the rest
    from headrace.bench.settings import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """As given on the command line; the text beside each type is its help. `settings` turns them into a run."""

    workload: Annotated[
        str, "traffic: random, azure-conv, mooncake, agentic-branching, … (see headrace bench workloads)"
    ] = "random"
    set: Annotated[tuple[str, ...], "NAME=VALUE, an option of the workload; may be repeated"] = ()
    isl: Annotated[str | None, "prompt tokens, N or LOW:HIGH (workloads that have it)"] = None
    osl: Annotated[str | None, "answer tokens, N or LOW:HIGH (workloads that have it)"] = None
    file: Annotated[str | None, "file of the workload `file`: JSONL or ShareGPT"] = None
    requests: Annotated[int | None, "requests to send; 64 unless --duration is given"] = None
    duration: Annotated[float | None, "seconds after which no new request starts"] = None
    concurrency: Annotated[str | None, "users at any moment (closed loop); a list 1,2,4 makes a sweep"] = None
    rate: Annotated[str | None, "requests per second; a list 1,2,4 makes a sweep, START:END a ramp over --duration"] = (
        None
    )
    arrivals: Annotated[str | None, "closed, constant, poisson, gamma, ramp or trace"] = None
    burstiness: Annotated[float | None, "shape of gamma arrivals: below 1 gives bursts, above 1 even spacing"] = None
    time_scale: Annotated[float, "factor on a trace's arrival times (0.5: twice as fast)"] = 1.0
    warmup: Annotated[int | None, "requests sent before the measurement; default: the concurrency, at most 8"] = None
    seed: Annotated[int, "seed of lengths, times and words"] = 0
    salt: Annotated[str, "changes the words and nothing else, so that no earlier run's cache answers"] = ""
    too_long: Annotated[str, "requests longer than the context: skip, clip or scale (all lengths by one factor)"] = (
        "skip"
    )
    scale: Annotated[float, "factor on all lengths of the workload"] = 1.0
    max_context: Annotated[int | None, "context length in tokens, if the endpoint does not report it"] = None
    endpoint: Annotated[str, "chat or completions"] = "chat"
    api_key: Annotated[str | None, "sent as a bearer token (also from OPENAI_API_KEY)"] = None
    header: Annotated[tuple[str, ...], "NAME: VALUE, sent with every request; may be repeated"] = ()
    timeout: Annotated[float, "seconds within which an answer must end"] = 600.0
    tokenizer: Annotated[str, "tokenizer for exact prompt lengths; without it they are checked through usage"] = ""
    natural_length: Annotated[bool, "let answers end where the model ends them"] = False
    processes: Annotated[int, "client processes; more are started automatically when one is not enough"] = 1
    slo: Annotated[str, "objective, such as ttft_p99<500ms,itl_p99<50ms"] = ""
    usd_per_hour: Annotated[float | None, "price of the machine, for dollars per million tokens"] = None
    max_failures: Annotated[str, "share of failed requests above which a run is not valid"] = "10%"
    max_client_delay: Annotated[float, "milliseconds (p99) that the client itself may add to a latency"] = 10.0
    idle_wait: Annotated[
        float, "seconds to wait at most before each run until other programs of this host are idle"
    ] = 0.0
    headroom: Annotated[bool, "check on the golden server before the run that the client is fast enough"] = True

    def settings(
        self, *, url: str = "", model: str = "", concurrency: str | None = None, rate: str | None = None
    ) -> RunSettings:
        """One run's settings; `concurrency` and `rate` replace the given ones (a point of a sweep)."""
        from headrace.bench.arrivals import ArrivalOptions
        from headrace.bench.endpoint import Endpoint, Kind
        from headrace.bench.settings import RunSettings, WriterSettings
        from headrace.bench.slo import Slo
        from headrace.bench.stats import parse_share

        if self.endpoint not in ("chat", "completions"):
            raise InvalidInput(f"must be chat or completions, got {self.endpoint!r}", field="--endpoint")
        if self.too_long not in ("skip", "clip", "scale"):
            raise InvalidInput(f"must be skip, clip or scale, got {self.too_long!r}", field="--too-long")
        if self.processes < 1:
            raise InvalidInput(f"must be at least 1, got {self.processes}", field="--processes")
        if self.slo:
            Slo.parse(self.slo)
        if self.file is not None and not Path(self.file).is_file():
            raise InvalidInput(f"there is no file {self.file}", field="--file")
        users = _whole(concurrency or self.concurrency, "--concurrency")
        arrivals = ArrivalOptions(
            concurrency=users,
            rate=rate or self.rate,
            kind=self.arrivals,
            burstiness=self.burstiness,
            time_scale=self.time_scale,
            over_s=self.duration,
        )
        kind: Kind = "chat" if self.endpoint == "chat" else "completions"
        settings = RunSettings(
            endpoint=Endpoint(url, model, kind, self._headers(), self.timeout),
            workload=self.workload,
            workload_options=self.workload_options(),
            requests=self.requests,
            duration_s=self.duration,
            warmup=self.warmup if self.warmup is not None else min(users or 4, 8),
            arrivals=arrivals,
            seed=self.seed,
            salt=self.salt,
            too_long=self.too_long,  # type: ignore[arg-type]
            scale=self.scale,
            max_context=self.max_context,
            writer=WriterSettings(tokenizer=self.tokenizer),
            processes=self.processes,
            slo=self.slo,
            usd_per_hour=self.usd_per_hour,
            max_failures=parse_share(self.max_failures, "--max-failures"),
            max_client_delay_s=self.max_client_delay / 1e3,
            idle_wait_s=self.idle_wait,
        )
        settings.check()
        return settings

    def points(self) -> tuple[str, list[str]]:
        """What a list of rates or concurrencies sweeps over: its name and values; empty when there is no list."""
        for name, text in (("concurrency", self.concurrency), ("rate", self.rate)):
            if text and "," in text:
                values = [part.strip() for part in text.split(",") if part.strip()]
                for value in values:
                    try:
                        float(value)
                    except ValueError:
                        raise InvalidInput(f"expected numbers, got {value!r}", field=f"--{name}") from None
                return name, values
        return "", []

    def point(self, name: str, value: str) -> RunSettings:
        """The settings of one point of a sweep."""
        single = replace(self, concurrency=None, rate=None)
        return single.settings(**{name: value})

    def workload_options(self) -> dict[str, str]:
        """The workload's options as texts, `--isl`, `--osl` and `--file` among them."""
        given: dict[str, str] = {}
        for text in self.set:
            name, equals, value = text.partition("=")
            if not equals:
                raise InvalidInput(f"expected NAME=VALUE, got {text!r}", field="--set")
            given[name.strip()] = value.strip()
        named = {"isl": self.isl, "osl": self.osl, "path": self.file}
        return given | {name: value for name, value in named.items() if value is not None}

    def _headers(self) -> tuple[tuple[str, str], ...]:
        headers = []
        for text in self.header:
            name, colon, value = text.partition(":")
            if not colon:
                raise InvalidInput("expected NAME: VALUE", field="--header")
            headers.append((name.strip(), value.strip()))
        if self.api_key:
            headers.append(("Authorization", f"Bearer {self.api_key}"))
        return tuple(headers)


def _whole(text: str | None, field: str) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"expected a whole number, got {text!r}", field=field) from None
