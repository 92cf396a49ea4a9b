package dataplane

// Watcher is a Backend whose Replace finds what somebody else changed of what it
// wrote, and can tell.
type Watcher interface {
	// Drifted receives when what the kernel holds may not be what was written
	// any more, so that nobody need wait for the next audit. The answer is a
	// Replace; when, is up to the caller. It is nil for a backend that hears of
	// nothing.
	Drifted() <-chan struct{}

	// Repaired tells, once, what syncs found changed, and put right, since it was
	// last asked. It is asked after each sync, by the same goroutine.
	Repaired() Repair
}

// Repair is what somebody else had changed in the kernel, counted in the
// backend's own objects (elements, rules, chains ...).
type Repair struct {
	Missing int    // what was written and was gone, or was otherwise
	Foreign int    // what nobody had written
	Found   string // what it was, or the first of it; "" if there is nothing
}

// Any reports whether there was anything to put right.
func (r Repair) Any() bool { return r.Missing+r.Foreign > 0 }

// Add counts what another look found.
func (r *Repair) Add(more Repair) {
	if r.Found != "" && more.Found != "" {
		more.Found = "; " + more.Found
	}
	r.Missing, r.Foreign, r.Found = r.Missing+more.Missing, r.Foreign+more.Foreign, r.Found+more.Found
}

// Note counts what is missing or foreign.
func (r *Repair) Note(missing, foreign int, what string) {
	if r.Found == "" && missing+foreign > 0 {
		r.Found = what
	}
	r.Missing, r.Foreign = r.Missing+missing, r.Foreign+foreign
}
