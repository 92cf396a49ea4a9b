import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { short } from "../text";

export interface Line {
  name: string;
  /** color is a variable of the style sheet. */
  color: string;
  fill?: boolean;
}

interface Props {
  label: string;
  lines: Line[];
  /** data has the times in seconds, then the values of each line; null: unknown. */
  data: (number | null)[][];
  height: number;
}

/** color computes a variable of the style sheet for a canvas. */
function color(element: Element, name: string): string {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** Chart draws lines over time. Its label says in words what it shows. */
export function Chart({ label, lines, data, height }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | undefined>(undefined);
  const latest = useRef(data);
  latest.current = data;

  useEffect(() => {
    const element = place.current!;
    const make = () => {
      plot.current?.destroy();
      const c = (name: string) => color(element, name);
      const axis = { stroke: c("--soft"), grid: { stroke: c("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      plot.current = new uPlot(
        {
          width: element.clientWidth,
          height,
          legend: { show: false },
          cursor: { show: false },
          padding: [8, 28, 0, 0],
          scales: { y: { range: (_, __, max) => [0, Math.max(max * 1.15, 1)] } },
          axes: [
            { ...axis, size: 24, space: 90, values: [[10, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
            { ...axis, size: 52, space: 36, values: (_, ticks) => ticks.map(short) },
          ],
          series: [
            {},
            ...lines.map((l) => ({
              label: l.name,
              stroke: c(l.color),
              width: 1.5,
              fill: l.fill ? c(l.color).replace(/^rgb\((.*)\)$/, "rgba($1, 0.12)") : undefined,
              points: { show: false },
            })),
          ],
        },
        latest.current as unknown as uPlot.AlignedData,
        element,
      );
    };
    make();
    const sizes = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height }));
    sizes.observe(element);
    // The colors of a canvas do not follow the theme by themselves.
    const media = matchMedia("(prefers-color-scheme: dark)");
    media.addEventListener("change", make);
    const theme = new MutationObserver(make);
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => {
      sizes.disconnect();
      theme.disconnect();
      media.removeEventListener("change", make);
      plot.current?.destroy();
      plot.current = undefined;
    };
  }, [height, lines.map((l) => l.name).join()]);

  useEffect(() => plot.current?.setData(data as unknown as uPlot.AlignedData), [data]);

  return (
    <figure class="chart">
      <figcaption class="key">
        {lines.map((l) => (
          <span key={l.name}>
            <i class="swatch" style={{ background: `var(${l.color})` }} />
            {l.name}
          </span>
        ))}
      </figcaption>
      <div ref={place} role="img" aria-label={label} style={{ height: `${height}px` }} />
    </figure>
  );
}

/** Spark is a small line without axes. */
export function Spark({ values }: { values: number[] }) {
  const width = 96;
  const height = 20;
  const top = Math.max(...values, 1);
  const step = width / Math.max(values.length - 1, 1);
  const points = values.map((v, i) => `${(i * step).toFixed(1)},${(height - 1 - (v / top) * (height - 3)).toFixed(1)}`).join(" ");
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} width={width} height={height} aria-hidden="true">
      <polyline points={points} />
    </svg>
  );
}
