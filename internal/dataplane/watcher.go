package dataplane

// Watcher is a Backend that hears when somebody else changes what it wrote, and
// so need not wait for the next audit.
type Watcher interface {
	// Drifted receives when what the kernel holds may not be what was written
	// any more. The answer is a Replace; when, is up to the caller.
	Drifted() <-chan struct{}

	// Repaired tells what the last Replace that succeeded found changed, and put
	// right. It is asked after each Replace, by the same goroutine.
	Repaired() Repair
}

// Repair is what somebody else had changed in the kernel, counted in the
// backend's own objects (elements, rules ...).
type Repair struct {
	Missing int    // what was written and was gone, or was otherwise
	Foreign int    // what nobody had written
	First   string // one of them, "" if there is none
}

// Any reports whether there was anything to put right.
func (r Repair) Any() bool { return r.Missing+r.Foreign > 0 }

// Note counts what is missing or foreign.
func (r *Repair) Note(missing, foreign int, what string) {
	if r.First == "" && missing+foreign > 0 {
		r.First = what
	}
	r.Missing, r.Foreign = r.Missing+missing, r.Foreign+foreign
}
