import { useMemo, useState } from "preact/hooks";
import { useApp } from "../context";
import { Chip, Message, Name } from "../parts/basics";
import { Spark } from "../parts/chart";
import { useSource, useTick } from "../parts/hooks";
import { Table } from "../parts/table";
import type { TableColumn } from "../parts/table";
import { failingCounts, handshakeOf, handshakeText, healthText, rateOf, select, wrong } from "../services";
import type { Column, Row } from "../services";
import { count, plural, short, shown } from "../text";
import { nowSecond, seconds } from "../traffic";

/** Services lists every Service with its counters. */
export function Services() {
  const app = useApp();
  const { cluster } = app;
  useSource(cluster.serviceList);
  useTick(1000);
  const [search, setSearch] = useState("");
  const [onlyWrong, setOnlyWrong] = useState(false);
  const [sort, setSort] = useState<{ id: Column; descending: boolean }>({ id: "rate", descending: true });
  const second = nowSecond();
  const live = cluster.watch.connected && !cluster.reported.why;
  const t = cluster.traffic;
  const table = cluster.services;

  // An order by numbers that changed each second could not be read. What is shown is what it was sorted by.
  const slow = Math.floor(second / 5);
  const numbers = useMemo(
    () => new Map(table.rows.map((r) => [r.key, { rate: rateOf(r, t, second, live), handshake: handshakeOf(r, t, 0.5), handshakeText: handshakeText(r, t, 0.5) ?? "–" }])),
    [table.rows, slow, live, t],
  );
  const failing = useMemo(() => failingCounts(table.rows, t, second), [table.rows, slow, t]);
  const value = (row: Row): number | string | undefined => {
    switch (sort.id) {
      case "name":
        return row.key;
      case "type":
        return row.type;
      case "health":
        return wrong(row);
      case "rate":
      case "handshake":
        return numbers.get(row.key)?.[sort.id];
      case "endpoints":
        return row.endpoints;
      default:
        return row.counted ? row[sort.id] : undefined;
    }
  };
  const chosen = useMemo(() => (onlyWrong ? table.rows.filter((r) => wrong(r) > 0 || failing.has(r.key)) : table.rows), [table.rows, onlyWrong, failing]);
  const rows = useMemo(() => select(chosen, search, value, sort.descending), [chosen, search, sort, numbers]);

  const counted = (r: Row, n: number, mood: string) => (r.counted ? <span class={n > 0 ? mood : ""}>{short(n)}</span> : "–");
  const columns: TableColumn<Row>[] = [
    { id: "name", title: "Service", sortable: true, cell: (r) => <Name namespace={r.namespace} text={r.name} /> },
    { id: "health", title: "Health", sortable: true, cell: (r) => <Health row={r} /> },
    { id: "type", title: "Type", sortable: true, cell: (r) => shown(r.type) },
    { id: "ports", title: "Ports", cell: (r) => <Name text={r.ports} soft /> },
    { id: "endpoints", title: "Endpoints", number: true, sortable: true, cell: (r) => <EndpointCount row={r} failing={failing.get(r.key)} /> },
    { id: "rate", title: "New/s", number: true, sortable: true, cell: (r) => { const n = numbers.get(r.key)?.rate; return n === undefined ? "–" : short(n); } },
    { id: "spark", title: "Last minute", cell: (r) => { const s = t.services.get(r.key); return s ? <Spark values={s.opened.series(second - 1, seconds)} /> : null; } },
    { id: "handshake", title: "Handshake", number: true, sortable: true, cell: (r) => numbers.get(r.key)?.handshakeText ?? "–" },
    { id: "active", title: "Active", number: true, sortable: true, cell: (r) => counted(r, r.active, "") },
    { id: "refused", title: "Refused", number: true, sortable: true, cell: (r) => counted(r, r.refused, "warn") },
    { id: "dropped", title: "Dropped", number: true, sortable: true, cell: (r) => counted(r, r.dropped, "bad") },
  ];
  const onSort = (id: string) =>
    setSort((s) => ({ id: id as Column, descending: s.id === id ? !s.descending : id !== "name" && id !== "type" }));
  const open = app.detail?.kind === "service" ? `${app.detail.namespace}/${app.detail.name}` : undefined;

  return (
    <div class="fill">
      <div class="bar-of-view">
        <h1>Services</h1>
        <input type="search" placeholder="Search: name, address, port" aria-label="Search Services" value={search} onInput={(e) => setSearch(e.currentTarget.value)} />
        <button type="button" aria-pressed={onlyWrong} onClick={() => setOnlyWrong(!onlyWrong)}>With findings only</button>
        <span class="soft" role="status">{search || onlyWrong ? `${count(rows.length)} of ${plural(table.rows.length, "Service")}` : plural(table.rows.length, "Service")}</span>
      </div>
      {cluster.serviceList.error && <p class="banner bad" role="alert">{shown(cluster.serviceList.error)}</p>}
      {table.rows.length === 0 && !cluster.serviceList.error ? (
        cluster.serviceList.value ? <Message title="This node has no Service"><p>It has not read any from the API server, or all are left to another proxy.</p></Message> : <Message title="Reading the Services …" />
      ) : rows.length === 0 && onlyWrong && !search ? (
        <Message title="No Service has a finding" mood="good" />
      ) : rows.length === 0 ? (
        <Message title="No Service matches"><p>The search looks for all words in names, types, ports and addresses.</p></Message>
      ) : (
        <Table
          name="services"
          label="Services"
          columns={columns}
          rows={rows}
          rowKey={(r) => r.key}
          sort={sort}
          onSort={onSort}
          open={open}
          onOpen={(r) => app.open({ kind: "service", namespace: r.namespace, name: r.name })}
        />
      )}
    </div>
  );
}

/** Health is the worst that is known of a Service, and how much more there is. */
function Health({ row: r }: { row: Row }) {
  const text = healthText(r);
  if (text === "ok") return <span class="soft">ok</span>;
  const more = r.faults.length + r.problems.length - 1;
  const all = [...r.faults.map((f) => f.title), ...r.problems.map((p) => p.what)];
  const bad = !r.served || r.faults.some((f) => f.severity === "critical");
  return <span title={all.map(shown).join("\n")}><Chip mood={bad ? "bad" : "warn"}>{shown(text)}</Chip>{more > 0 && <span class="soft"> +{count(more)}</span>}</span>;
}

function EndpointCount({ row: r, failing }: { row: Row; failing?: number }) {
  if (!failing) return <span class={r.endpoints === 0 ? "warn" : ""}>{count(r.endpoints)}</span>;
  return <span class="bad" title={`${count(failing)} of ${plural(r.endpoints, "endpoint")} ${failing === 1 ? "fails" : "fail"}`}>{count(failing)} of {count(r.endpoints)} fail</span>;
}
