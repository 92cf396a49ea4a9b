import { useEffect, useLayoutEffect, useReducer, useRef } from "preact/hooks";
import type { Source } from "../schedule";

/** useSource draws the component again when one of the sources has changed. */
export function useSource(...sources: Source[]) {
  const [, draw] = useReducer<number, void>((n) => n + 1, 0);
  // Before the browser draws, so that no change is missed in between.
  useLayoutEffect(() => {
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

/** useKeys calls a function for each key, from the moment the component is seen until it goes. */
export function useKeys(onKey: (e: KeyboardEvent) => void) {
  const latest = useRef(onKey);
  latest.current = onKey;
  // useEffect would run after the browser drew: a key pressed in between would be lost.
  useLayoutEffect(() => {
    const call = (e: KeyboardEvent) => latest.current(e);
    addEventListener("keydown", call);
    return () => removeEventListener("keydown", call);
  }, []);
}
