package suite

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"spillway.dev/spillway/lab/experiment"
)

// plan estimates the duration of all rows, and corrects the estimate by the rows that are
// done.
type plan struct {
	mu             sync.Mutex
	rows, finished int
	all            time.Duration // expected, of all rows
	done           time.Duration // expected duration of the finished rows
	took           time.Duration // actual duration of the finished rows
	since          time.Time     // when the current row began
}

func (p *plan) add(takes time.Duration) {
	p.rows++
	p.all += takes
}

// finish notes that a row is done.
func (p *plan) finish(takes, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished++
	p.done += takes
	p.took += took
	p.since = time.Now()
}

// left returns the estimated remaining time.
func (p *plan) left() time.Duration {
	factor := 1.0
	if p.done > 0 && p.took > time.Second {
		factor = float64(p.took) / float64(p.done)
	}
	rest := time.Duration(float64(p.all-p.done)*factor) - time.Since(p.since)
	return max(rest, 0).Round(time.Second)
}

const barWidth = 16

// bar is "[####............] 4 of 17, 1m20s left  ".
func (p *plan) bar() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	filled := 0
	if p.all > 0 {
		filled = int(int64(barWidth) * int64(p.done) / int64(p.all))
	}
	return fmt.Sprintf("[%s%s] %d of %d, %v left  ", strings.Repeat("#", filled),
		strings.Repeat(".", barWidth-filled), min(p.finished+1, p.rows), p.rows, p.left())
}

// show prints the bar before each line of progress until stop is called.
func (p *plan) show(progress *experiment.Progress) (stop func()) {
	p.mu.Lock()
	p.since = time.Now()
	p.mu.Unlock()
	progress.Bar(p.bar)
	tick := time.NewTicker(time.Second)
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-tick.C:
				progress.Refresh()
			case <-end:
				return
			}
		}
	})
	return func() {
		tick.Stop()
		close(end)
		wg.Wait()
		progress.Bar(nil)
		progress.Done()
	}
}
