package tftp

import (
	"context"
	"errors"
	"sync"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
)

// watch looks at the node's tables while files are read.
type watch struct {
	harness *harness.Harness
	began   time.Time
	before  conntrack.Counters
	lines   int
	err     error
	entries []experiment.Point
	expects []experiment.Point
	inPod   int // maximum number of entries of a pod
	stop    chan struct{}
	done    sync.WaitGroup
}

// watchEvery is often enough to see a table fill within a second.
const watchEvery = 200 * time.Millisecond

func startWatch(ctx context.Context, r *harness.Harness) *watch {
	w := &watch{harness: r, began: time.Now(), stop: make(chan struct{})}
	w.before, w.err = r.Counters(ctx, r.Cluster.Node(0))
	w.lines = logLines(ctx)
	w.done.Go(func() {
		tick := time.NewTicker(watchEvery)
		defer tick.Stop()
		for {
			w.look(ctx)
			select {
			case <-w.stop:
				return
			case <-tick.C:
			}
		}
	})
	return w
}

func (w *watch) look(ctx context.Context) {
	at := time.Since(w.began).Seconds()
	node := w.harness.Cluster.Node(0)
	n, err := node.ConntrackCount()
	if err == nil {
		w.entries = append(w.entries, experiment.Point{X: at, Y: float64(n)})
	}
	for i := range w.harness.Cluster.Spec.PodsPerNode {
		if n, err := w.harness.Cluster.Pod(0, i).ConntrackCount(); err == nil {
			w.inPod = max(w.inPod, n)
		}
	}
	expected, e := harness.Expectations(ctx, node)
	err = errors.Join(err, e)
	if err != nil {
		if ctx.Err() == nil {
			w.err = errors.Join(w.err, err)
		}
		return
	}
	w.expects = append(w.expects, experiment.Point{X: at, Y: float64(expected)})
}

// end stops watching and adds the observed values.
func (w *watch) end(ctx context.Context, m *experiment.Measurement) error {
	close(w.stop)
	w.done.Wait()
	after, err := w.harness.Counters(ctx, w.harness.Cluster.Node(0))
	if err = errors.Join(w.err, err); err != nil {
		return err
	}
	counted := after.Minus(w.before)
	m.Add("insert_failed", float64(counted.InsertFailed))
	m.Add("drop", float64(counted.Drop))
	m.Add("early_drop", float64(counted.EarlyDrop))
	m.Add("entries", most(w.entries))
	m.Add("pod_entries", float64(w.inPod))
	m.Add("expectations", most(w.expects))
	if lines := logLines(ctx); lines >= 0 && w.lines >= 0 {
		// The kernel limits equal messages, and its log is a ring.
		m.Add("log", float64(max(lines-w.lines, 0)))
	}
	m.Series = map[string][]experiment.Point{"entries": w.entries, "expectations": w.expects}
	return nil
}

func most(points []experiment.Point) (top float64) {
	for _, p := range points {
		top = max(top, p.Y)
	}
	return top
}

// logLines counts the lines of the kernel's log about conntrack; -1 if it is unreadable.
func logLines(ctx context.Context) int {
	log, err := conntrack.KernelLog(ctx)
	if err != nil {
		return -1
	}
	n := 0
	for _, c := range log {
		n += c.Lines
	}
	return n
}
