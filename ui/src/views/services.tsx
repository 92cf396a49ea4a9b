import { useMemo, useState } from "preact/hooks";
import { useApp } from "../context";
import { Chip, Message, Name } from "../parts/basics";
import { Spark } from "../parts/chart";
import { useSource, useTick } from "../parts/hooks";
import { Table } from "../parts/table";
import type { TableColumn } from "../parts/table";
import { handshakeOf, handshakeText, rateOf, select } from "../services";
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
  const [sort, setSort] = useState<{ id: Column; descending: boolean }>({ id: "rate", descending: true });
  const second = nowSecond();
  const live = cluster.watch.connected && !cluster.reported.why;
  const t = cluster.traffic;
  const table = cluster.services;

  const value = (row: Row): number | string | undefined => {
    switch (sort.id) {
      case "name":
        return row.key;
      case "type":
        return row.type;
      case "rate":
        return rateOf(row, t, second, live);
      case "handshake":
        return handshakeOf(row, t, 0.5);
      default:
        return row[sort.id];
    }
  };
  // An order by rates that changed each second could not be read.
  const slow = Math.floor(second / 5);
  const rows = useMemo(() => select(table.rows, search, value, sort.descending), [table.rows, search, sort, slow, live]);

  const columns: TableColumn<Row>[] = [
    { id: "name", title: "Service", sortable: true, cell: (r) => <><Name namespace={r.namespace} text={r.name} />{!r.served && <Chip mood="bad">not served</Chip>}{r.problems.length > 0 && <Chip mood="warn">{plural(r.problems.length, "problem")}</Chip>}{r.faults.map((id) => <Chip key={id} mood="bad">{shown(id)}</Chip>)}</> },
    { id: "type", title: "Type", sortable: true, cell: (r) => shown(r.type) },
    { id: "ports", title: "Ports", cell: (r) => <Name text={r.ports} soft /> },
    { id: "endpoints", title: "Endpoints", number: true, sortable: true, cell: (r) => <span class={r.endpoints === 0 ? "warn" : ""}>{count(r.endpoints)}</span> },
    { id: "rate", title: "New/s", number: true, sortable: true, cell: (r) => { const n = rateOf(r, t, second, live); return n === undefined ? "–" : short(n); } },
    { id: "spark", title: "Last minute", cell: (r) => { const s = t.services.get(r.key); return s ? <Spark values={s.opened.series(second, seconds)} /> : null; } },
    { id: "handshake", title: "Handshake", number: true, sortable: true, cell: (r) => handshakeText(r, t, 0.5) ?? "–" },
    { id: "active", title: "Active", number: true, sortable: true, cell: (r) => (r.counted ? short(r.active) : "–") },
    { id: "refused", title: "Refused", number: true, sortable: true, cell: (r) => (r.counted ? <span class={r.refused > 0 ? "warn" : ""}>{short(r.refused)}</span> : "–") },
    { id: "dropped", title: "Dropped", number: true, sortable: true, cell: (r) => (r.counted ? <span class={r.dropped > 0 ? "bad" : ""}>{short(r.dropped)}</span> : "–") },
  ];
  const onSort = (id: string) =>
    setSort((s) => ({ id: id as Column, descending: s.id === id ? !s.descending : id !== "name" && id !== "type" }));
  const open = app.detail?.kind === "service" ? `${app.detail.namespace}/${app.detail.name}` : undefined;

  return (
    <div class="fill">
      <div class="bar-of-view">
        <h1>Services</h1>
        <input type="search" placeholder="Search: name, address, port" aria-label="Search Services" value={search} onInput={(e) => setSearch(e.currentTarget.value)} />
        <span class="soft" role="status">{search ? `${count(rows.length)} of ${plural(table.rows.length, "Service")}` : plural(table.rows.length, "Service")}</span>
      </div>
      {cluster.serviceList.error && <p class="banner bad" role="alert">{shown(cluster.serviceList.error)}</p>}
      {table.rows.length === 0 && !cluster.serviceList.error ? (
        cluster.serviceList.value ? <Message title="This node has no Service"><p>It has not read any from the API server, or all are left to another proxy.</p></Message> : <Message title="Reading the Services …" />
      ) : rows.length === 0 && search ? (
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
