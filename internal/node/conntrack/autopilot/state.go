package autopilot

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// state is what the file holds.
type state struct {
	Boot    string       `json:"boot"` // the kernel's boot_id: a reboot sets everything back
	Records []savedState `json:"records"`
}

type savedState struct {
	Setting
	Record
}

func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// readState reads the changes of an agent before. No file, and one of before the
// last reboot, are none.
func readState(path string) (map[Setting]Record, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var s state
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if s.Boot != bootID() {
		return nil, nil
	}
	records := map[Setting]Record{}
	for _, r := range s.Records {
		records[r.Setting] = r.Record
	}
	return records, nil
}

// writeState replaces the file, or removes it if nothing is changed. It is there
// whole or not at all: what counts is that this process may be killed, not that
// the machine may, after which nothing is changed any more.
func writeState(path string, records map[Setting]Record) error {
	if len(records) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove %s: %w", path, err)
		}
		return nil
	}
	s := state{Boot: bootID()}
	for set, r := range records {
		s.Records = append(s.Records, savedState{set, r})
	}
	slices.SortFunc(s.Records, func(a, b savedState) int {
		return cmp.Or(cmp.Compare(a.Netns, b.Netns), cmp.Compare(a.Sysctl, b.Sysctl))
	})
	text, err := json.MarshalIndent(s, "", "  ")
	if err == nil {
		if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil {
			err = os.WriteFile(path+".new", append(text, '\n'), 0o644)
		}
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// GoBack sets everything back that an agent before has changed and nobody since,
// and removes the file.
func GoBack(path string, namespaces func() ([]conntrack.Namespace, error), log *slog.Logger) error {
	records, err := readState(path)
	if err != nil || len(records) == 0 {
		return errors.Join(err, writeState(path, nil))
	}
	list, _ := namespaces()
	var errs []error
	for set, r := range records {
		in, there := named(list, set.Netns)
		if !there {
			delete(records, set)
			continue
		}
		s := Step{Setting: set, Space: in.String(), From: r.Set, To: r.Found, Back: true}
		if set.Netns == 0 {
			s.Space = ""
		}
		_, err := writeStep(in, s)
		if err != nil && !errors.Is(err, errTaken) {
			errs = append(errs, err)
			continue
		}
		if delete(records, set); err != nil {
			continue
		}
		log.Info("conntrack autopilot", "step", s.String(), "why", "it is no longer on")
	}
	return errors.Join(append(errs, writeState(path, records))...)
}

// errTaken says that an operator was quicker.
var errTaken = errors.New("somebody else has set it meanwhile")

// writeStep sets a value in its namespace, if it still is what the step found,
// and returns what the kernel made of it.
func writeStep(in conntrack.Namespace, s Step) (got int, err error) {
	name := "net.netfilter." + s.Sysctl
	err = in.Enter(func() error {
		if cookie, err := kernel.NetnsCookie(); err != nil || s.Netns != 0 && cookie != s.Netns {
			return errors.Join(err, fmt.Errorf("write sysctl %s: %w", name, os.ErrNotExist))
		}
		if got, err = readSysctl(name); err != nil {
			return err
		}
		if got != s.From {
			return errTaken
		}
		if err := kernel.WriteSysctl(name, strconv.Itoa(s.To)); err != nil {
			return err
		}
		got, err = readSysctl(name)
		return err
	})
	return got, err
}

func readSysctl(name string) (int, error) {
	text, err := kernel.ReadSysctl(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("read sysctl %s: %w", name, err)
	}
	return n, nil
}
