import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export interface TableColumn<T> {
  id: string;
  title: string;
  /** number aligns to the right. */
  number?: boolean;
  sortable?: boolean;
  cell: (row: T) => ComponentChildren;
}

interface Props<T> {
  /** name is the class of the columns' widths. */
  name: string;
  label: string;
  columns: TableColumn<T>[];
  rows: T[];
  rowKey: (row: T) => string | number;
  mood?: (row: T) => string;
  onOpen: (row: T) => void;
  /** open is the key of the row that is shown in the panel. */
  open?: string | number;
  sort?: { id: string; descending: boolean };
  onSort?: (id: string) => void;
  /** onBrowse is called when the reader scrolls or moves in the rows. */
  onBrowse?: () => void;
}

export const rowHeight = 34;
const extra = 6;

/** Table draws only the rows that are seen, so it may have any number. */
export function Table<T>(p: Props<T>) {
  const scroller = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const [active, setActive] = useState<string | number | undefined>();
  const byUser = useRef(0);

  useLayoutEffect(() => {
    const element = scroller.current!;
    const observer = new ResizeObserver(() => setView((v) => ({ ...v, height: element.clientHeight })));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  const last = p.rows.length - 1;
  const at = active === undefined ? -1 : p.rows.findIndex((row) => p.rowKey(row) === active);

  const show = (index: number) => {
    const row = p.rows[index];
    if (!row) return;
    setActive(p.rowKey(row));
    p.onBrowse?.();
    const element = scroller.current!;
    const head = rowHeight;
    const room = element.clientHeight - head;
    if (index * rowHeight < element.scrollTop) element.scrollTop = index * rowHeight;
    else if ((index + 1) * rowHeight > element.scrollTop + room) element.scrollTop = (index + 1) * rowHeight - room;
  };

  const onKey = (e: KeyboardEvent) => {
    if (e.target !== scroller.current || e.ctrlKey || e.metaKey || e.altKey) return;
    const page = Math.max(1, Math.floor(view.height / rowHeight) - 2);
    const to: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: last };
    if (e.key in to) {
      e.preventDefault();
      show(Math.max(0, Math.min(last, to[e.key]!)));
    } else if ((e.key === "Enter" || e.key === " ") && at >= 0) {
      e.preventDefault();
      p.onOpen(p.rows[at]!);
    }
  };

  const onScroll = () => {
    const element = scroller.current!;
    setView({ top: element.scrollTop, height: element.clientHeight });
    if (element.scrollTop > 0 && Date.now() - byUser.current < 1000) p.onBrowse?.();
  };

  // A shorter list may leave the position beyond its end.
  useEffect(() => {
    const element = scroller.current!;
    if (element.scrollTop !== view.top) setView({ top: element.scrollTop, height: element.clientHeight });
  }, [p.rows.length]);

  const first = Math.max(0, Math.floor(view.top / rowHeight) - extra);
  const end = Math.min(p.rows.length, Math.ceil((view.top + view.height) / rowHeight) + extra);
  const id = (index: number) => `${p.name}-row-${index}`;
  const touched = () => (byUser.current = Date.now());

  return (
    <div
      class={`table ${p.name}`}
      ref={scroller}
      role="grid"
      tabIndex={0}
      aria-label={p.label}
      aria-rowcount={p.rows.length + 1}
      aria-colcount={p.columns.length}
      aria-activedescendant={at >= first && at < end ? id(at) : undefined}
      onKeyDown={onKey}
      onScroll={onScroll}
      onWheel={touched}
      onPointerDown={touched}
      onTouchMove={touched}
    >
      <div role="rowgroup" class="head">
        <div role="row" class="row" aria-rowindex={1}>
          {p.columns.map((c) => {
            const sorted = p.sort?.id === c.id;
            return (
              <div
                key={c.id}
                role="columnheader"
                class={`${c.id}${c.number ? " number" : ""}`}
                aria-sort={sorted ? (p.sort!.descending ? "descending" : "ascending") : undefined}
              >
                {c.sortable ? (
                  <button type="button" onClick={() => p.onSort?.(c.id)}>
                    {c.title}
                    <span aria-hidden="true">{sorted ? (p.sort!.descending ? " ↓" : " ↑") : ""}</span>
                  </button>
                ) : (
                  c.title
                )}
              </div>
            );
          })}
        </div>
      </div>
      <div role="rowgroup" class="rows" style={{ height: `${p.rows.length * rowHeight}px` }}>
        {p.rows.slice(first, end).map((row, i) => {
          const index = first + i;
          const key = p.rowKey(row);
          return (
            <div
              key={key}
              id={id(index)}
              role="row"
              aria-rowindex={index + 2}
              aria-selected={key === p.open}
              class={`row ${p.mood?.(row) ?? ""}${index === at ? " active" : ""}`}
              style={{ transform: `translateY(${index * rowHeight}px)` }}
              onClick={() => {
                setActive(key);
                p.onBrowse?.();
                p.onOpen(row);
              }}
            >
              {p.columns.map((c) => (
                <div key={c.id} role="gridcell" class={`${c.id}${c.number ? " number" : ""}`}>
                  {c.cell(row)}
                </div>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}
