package suite

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"spillway.dev/spillway/lab/experiment"
)

// plan estimates the duration of all rows. Rows that measured something correct the
// estimate; rows that failed at once do not.
type plan struct {
	mu             sync.Mutex
	rows, finished int
	all            time.Duration // expected, of all rows
	done           time.Duration // expected duration of the finished rows
	measured       time.Duration // expected duration of the rows that measured something
	took           time.Duration // their actual duration
	current        time.Duration // expected duration of the current row
	since          time.Time     // when it began
	shown          time.Duration // the remaining time never rises; 0: not shown yet
}

func (p *plan) add(takes time.Duration) {
	p.rows++
	p.all += takes
}

// begin notes that a row begins.
func (p *plan) begin(takes time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current, p.since = takes, time.Now()
}

// finish notes that the current row is done. took is 0 if it measured nothing.
func (p *plan) finish(takes, took time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finished++
	p.done += takes
	if took > 0 {
		p.measured += takes
		p.took += took
	}
	p.current, p.since = 0, time.Now()
}

// left returns the estimated remaining time. It stands still while the estimate is higher
// than it was before.
func (p *plan) left(now time.Time) time.Duration {
	factor := 1.0
	if p.measured > 0 && p.took > time.Second {
		factor = max(factor, float64(p.took)/float64(p.measured))
	}
	scaled := func(d time.Duration) time.Duration { return time.Duration(float64(d) * factor) }
	// A row that takes longer than expected does not shorten the others.
	rest := scaled(p.all-p.done) - min(now.Sub(p.since), scaled(p.current))
	rest = max(rest, time.Second).Round(time.Second)
	if p.shown > 0 {
		rest = min(rest, p.shown)
	}
	p.shown = rest
	return rest
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
		strings.Repeat(".", barWidth-filled), min(p.finished+1, p.rows), p.rows, p.left(time.Now()))
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
