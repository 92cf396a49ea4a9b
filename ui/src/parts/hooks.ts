import { useEffect, useReducer } from "preact/hooks";
import type { Source } from "../schedule";

/** useSource draws the component again when one of the sources has changed. */
export function useSource(...sources: Source[]) {
  const [, draw] = useReducer<number, void>((n) => n + 1, 0);
  useEffect(() => {
    const ends = sources.map((s) => s.subscribe(() => draw()));
    return () => ends.forEach((end) => end());
  }, sources);
}

/** useTick draws the component again every so many ms. */
export function useTick(pause: number) {
  const [, draw] = useReducer<number, void>((n) => n + 1, 0);
  useEffect(() => {
    const timer = setInterval(() => draw(), pause);
    return () => clearInterval(timer);
  }, [pause]);
}
