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

// state is the content of the file.
type state struct {
	Boot    string       `json:"boot"` // the kernel's boot_id: a reboot resets every setting
	Records []savedState `json:"records"`
}

type savedState struct {
	setting
	record
}

func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id))
}

// readState reads the changes of a previous agent. It returns none without a file, or if
// the file is older than the last reboot.
func readState(path string) (map[setting]record, error) {
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
	records := map[setting]record{}
	for _, r := range s.Records {
		records[r.setting] = r.record
	}
	return records, nil
}

// writeState replaces the file atomically, or removes it if there are no changes. It does
// not sync the file: after a crash of the machine every setting is reset anyway.
func writeState(path string, records map[setting]record) error {
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

// Restore restores the settings that a previous agent changed and no other program has
// changed since, and removes the file.
func Restore(path string, namespaces func() ([]conntrack.Namespace, error), log *slog.Logger) error {
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
		s := step{setting: set, Space: in.String(), From: r.Set, To: r.Found, Back: true}
		if set.Netns == 0 {
			s.Space = ""
		}
		_, err := writeStep(in, s)
		if err != nil && !errors.Is(err, errChangedElsewhere) {
			errs = append(errs, err)
			continue
		}
		if delete(records, set); err != nil {
			continue
		}
		log.Info("conntrack autopilot", "step", s.String(), "why", "the autopilot is no longer on")
	}
	return errors.Join(append(errs, writeState(path, records))...)
}

// errChangedElsewhere says that another program or an operator has changed the value.
var errChangedElsewhere = errors.New("another program has changed the value meanwhile")

// writeStep sets a value in its namespace if it still has the value From, and returns the
// value that the kernel chose.
func writeStep(in conntrack.Namespace, s step) (got int, err error) {
	name := conntrack.SysctlPrefix + s.Sysctl
	err = in.Enter(func() error {
		if cookie, err := kernel.NetnsCookie(); err != nil || s.Netns != 0 && cookie != s.Netns {
			return errors.Join(err, fmt.Errorf("write sysctl %s: %w", name, os.ErrNotExist))
		}
		if got, err = readSysctl(name); err != nil {
			return err
		}
		if got != s.From {
			return errChangedElsewhere
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
