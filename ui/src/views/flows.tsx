import { create } from "@bufbuild/protobuf";
import { useEffect, useLayoutEffect, useMemo, useState } from "preact/hooks";
import { useApp } from "../context";
import { Watch } from "../flows";
import type { Entry } from "../flows";
import { EventKind, FlowEventSchema } from "../gen/spillway/node/v1alpha1/node_pb";
import type { FlowEvent } from "../gen/spillway/node/v1alpha1/node_pb";
import { Chip, Message, Name } from "../parts/basics";
import { useKeys, useSource, useTick } from "../parts/hooks";
import { Table } from "../parts/table";
import type { TableColumn } from "../parts/table";
import { Poll } from "../poll";
import { isEmpty, noQuery, toFilter } from "../query";
import type { FlowQuery } from "../query";
import { bytes, clock, count, countsBytes, kinds, peer, plural, short, shown, span, stateText } from "../text";
import { notReported, failure, nowSecond } from "../traffic";

/** Row is an event, or a flow of the table with its state. */
interface Row {
  id: number | string;
  event: FlowEvent;
  state?: string;
}

const moods = { silent: "bad", reset: "bad", dropped: "bad", refused: "warn", none: "" };

const tableLimit = 1000;

function Kind({ row }: { row: Row }) {
  if (row.state !== undefined) return <Chip mood={row.event.flow?.handshake ? "good" : "soft"}>{shown(row.state || "open")}</Chip>;
  const how = failure(row.event);
  if (how === "silent") return <Chip mood="bad">no answer</Chip>;
  if (how === "reset") return <Chip mood="bad">reset</Chip>;
  const kind = kinds.find((k) => k.kind === row.event.kind);
  return <Chip mood={kind?.mood ?? "soft"}>{kind?.name ?? "unknown"}</Chip>;
}

/** bytesText is what a flow has moved, once that is known. */
function bytesText({ event, state }: Row) {
  const f = event.flow;
  if (!f || (event.kind !== EventKind.CLOSED && state === undefined)) return "–";
  return countsBytes(f) ? bytes(f.bytesToClient + f.bytesToEndpoint) : <span class="soft">not known</span>;
}

const columns: TableColumn<Row>[] = [
  { id: "time", title: "Time", cell: (r) => clock(r.event.time) },
  { id: "kind", title: "What", cell: (r) => <Kind row={r} /> },
  { id: "client", title: "Client", cell: (r) => <Name text={r.event.flow?.client?.pod || peer(r.event.flow?.client)} /> },
  { id: "service", title: "Service", cell: (r) => <Name namespace={r.event.flow?.namespace} text={`${r.event.flow?.service ?? ""}${r.event.flow?.portName ? `:${r.event.flow.portName}` : ""}`} /> },
  { id: "endpoint", title: "Endpoint", cell: (r) => (r.event.flow?.endpoint ? <Name text={r.event.flow.endpoint.pod || peer(r.event.flow.endpoint)} /> : <span class="soft">none</span>) },
  { id: "handshake", title: "Handshake", number: true, cell: (r) => span(r.event.flow?.handshake) },
  { id: "bytes", title: "Bytes", number: true, cell: (r) => bytesText(r) },
  { id: "reason", title: "Why", cell: (r) => <Name text={r.event.reason} soft /> },
];

/** Flows shows events as they happen, or the flows that are open now. */
export function Flows() {
  const app = useApp();
  const { cluster, query } = app;
  const [open, setOpen] = useState(false);
  const [folded, setFolded] = useState(true);
  const problem = useMemo(() => toFilter(query).problem, [query]);
  return (
    <div class={`fill ${folded ? "folded" : ""}`}>
      <div class="bar-of-view">
        <h1>Flows</h1>
        <div class="switch" role="group" aria-label="Which flows">
          <button type="button" aria-pressed={!open} onClick={() => setOpen(false)}>Events</button>
          <button type="button" aria-pressed={open} onClick={() => setOpen(true)}>Open now</button>
        </div>
        <button type="button" class="fold" aria-expanded={!folded} aria-pressed={!isEmpty(query)} onClick={() => setFolded(!folded)}>{isEmpty(query) ? "Filter" : "Filtered"}</button>
        {!open && (
          <div class="switch kinds" role="group" aria-label="Kinds of events">
            {kinds.map((k) => (
              <button
                key={k.kind}
                type="button"
                aria-pressed={query.kinds.includes(k.kind)}
                onClick={() => app.setQuery({ ...query, kinds: query.kinds.includes(k.kind) ? query.kinds.filter((x) => x !== k.kind) : [...query.kinds, k.kind] })}
              >
                {k.name}
              </button>
            ))}
          </div>
        )}
      </div>
      <Filter query={query} onChange={app.setQuery} problem={problem} />
      {open ? <OpenNow key={`open ${cluster.selected}`} query={query} /> : <Events key={`events ${cluster.selected}`} query={query} />}
    </div>
  );
}

function Filter({ query, onChange, problem }: { query: FlowQuery; onChange: (q: FlowQuery) => void; problem: string }) {
  const field = (name: "service" | "pod" | "address" | "port", label: string, placeholder: string) => (
    <label class={name}>
      {label}
      <input value={query[name]} placeholder={placeholder} spellcheck={false} autocomplete="off" onInput={(e) => onChange({ ...query, [name]: e.currentTarget.value })} />
    </label>
  );
  return (
    <div class="filter">
      {field("service", "Service", "shop/web")}
      {field("pod", "Pod", "shop/web-0")}
      {field("address", "Address", "10.0.0.0/8")}
      {field("port", "Port", "443")}
      <button type="button" disabled={isEmpty(query)} onClick={() => onChange(noQuery)}>Clear</button>
      {problem && <p class="warn" role="alert">{problem}</p>}
    </div>
  );
}

/** useLate returns a value once it has not changed for a time. */
function useLate<T>(value: T, pause: number): T {
  const [late, setLate] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setLate(value), pause);
    return () => clearTimeout(timer);
  }, [value]);
  return late;
}

function Events({ query: typed }: { query: FlowQuery }) {
  const app = useApp();
  const { cluster } = app;
  const query = useLate(typed, 300);
  const { filter, problem } = toFilter(query);
  const all = isEmpty(query);
  // The agent filters, so that rare events are not lost among the others.
  const own = useMemo(() => (all ? cluster.watch : new Watch()), [query, all]);
  useEffect(() => {
    if (all || problem) return;
    own.start(cluster.api.all, filter, 300_000);
    return () => own.close();
  }, [own]);
  useSource(own);
  useTick(1000);
  const [frozen, setFrozen] = useState<{ rows: Row[]; total: number } | undefined>();
  useLayoutEffect(() => setFrozen(undefined), [own]);

  const visible = cluster.selected < 0 ? undefined : (e: Entry) => cluster.shows(e.event.flow?.node ?? "");
  const rows: Row[] = frozen?.rows ?? own.entries.newestFirst(visible);
  // What stays is what the reader sees, not what came after it was drawn.
  const { total } = own.entries;
  const pause = () => setFrozen((f) => f ?? { rows, total });
  const toggle = () => (frozen ? setFrozen(undefined) : pause());
  useKeys((e) => {
    if (e.key.toLowerCase() !== "p" || e.ctrlKey || e.metaKey || e.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test((e.target as HTMLElement).tagName)) return;
    toggle();
  });

  const second = nowSecond();
  const rate = cluster.traffic.totals.all.rate(second, 5);
  const { why } = cluster.reported;
  const newer = frozen ? own.entries.total - frozen.total : 0;
  return (
    <>
      <div class="bar-of-list">
        <button type="button" class="pause" onClick={toggle} aria-keyshortcuts="P">{frozen ? "Resume" : "Pause"}</button>
        <span class="soft" role="status">
          {frozen ? `Paused. ${count(newer)} newer` : own.connected ? `${plural(rows.length, "event")}, the newest first` : own.error ? "" : "Connecting …"}
        </span>
        {all && !frozen && own.connected && <span class="soft">{short(rate)} events/s</span>}
        {own.missed > 0n && <span class="warn" role="status">{count(own.missed)} events were left out: the page was too slow</span>}
      </div>
      {own.error && !problem && <p class="banner warn" role="alert">{shown(own.error)} The list “Open now” works without events.</p>}
      {rows.length === 0 && own.error ? null : rows.length === 0 ? (
        <Message title={problem ? "The filter is not complete" : all ? (why === "turning on" ? "Turning on events of flows …" : "No event yet") : "No event matches"}>
          <p>{problem || (why === "not known" ? notReported : all ? "Events appear here when clients open, use and close flows." : "Matching events appear here when they happen. The agent remembers some minutes.")}</p>
        </Message>
      ) : (
        <Table
          name="flows"
          label="Events of flows"
          columns={columns}
          rows={rows}
          rowKey={(r) => r.id}
          mood={(r) => moods[failure(r.event) ?? "none"]}
          open={app.detail?.kind === "flow" ? app.detail.id : undefined}
          onOpen={(r) => app.open({ kind: "flow", event: r.event, id: r.id })}
          onBrowse={pause}
        />
      )}
    </>
  );
}

function OpenNow({ query: typed }: { query: FlowQuery }) {
  const app = useApp();
  const { cluster } = app;
  const query = useLate(typed, 300);
  const { filter, problem } = toFilter({ ...query, kinds: [] });
  const poll = useMemo(
    () =>
      new Poll(async () => {
        if (problem) return { rows: [], more: false };
        await cluster.ready();
        const results = await cluster.call((c) => c.listFlows({ filter, limit: tableLimit }));
        const failed = results.find((r) => r.error);
        if (failed && results.every((r) => r.error)) throw new Error(failed.error);
        const rows = results.flatMap((r) =>
          (r.value?.flows ?? []).map((flow): Row => ({
            id: [flow.protocol, peer(flow.client), peer(flow.serviceAddress), flow.node].join(" "),
            event: create(FlowEventSchema, { flow, time: flow.opened, kind: EventKind.OPENED }),
            state: stateText(flow),
          })),
        );
        return { rows, more: results.some((r) => r.value?.more) };
      }, 5000),
    [query],
  );
  useSource(poll);
  const rows = poll.value?.rows ?? [];
  return (
    <>
      <div class="bar-of-list">
        <button type="button" onClick={() => void poll.again()}>Read again</button>
        <span class="soft" role="status">{poll.value ? plural(rows.length, "flow") + (poll.value.more ? ", and more: use a filter" : "") : "Reading …"}</span>
      </div>
      {poll.error && <p class="banner bad" role="alert">{shown(poll.error)}</p>}
      {rows.length === 0 ? (
        <Message title={problem ? "The filter is not complete" : poll.value ? "No flow is open" : "Reading the flows …"}>{problem && <p>{problem}</p>}</Message>
      ) : (
        <Table
          name="flows"
          label="Open flows"
          columns={columns}
          rows={rows}
          rowKey={(r) => r.id}
          open={app.detail?.kind === "flow" ? app.detail.id : undefined}
          onOpen={(r) => app.open({ kind: "flow", event: r.event, id: r.id })}
        />
      )}
    </>
  );
}
