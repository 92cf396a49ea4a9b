package upgrade

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"spillway.dev/spillway/test/must"
)

// Several steps are gone one after another, each map by its own.
func TestMigrationSteps(t *testing.T) {
	add := func(s string) convert {
		return func(e Entry) (Entry, bool, error) {
			return Entry{e.key, append(bytes.Clone(e.value), s...)}, !strings.Contains(string(e.value), "drop"), nil
		}
	}
	setMigrations(t, map[int]Migration{
		3: {"flows": add("4"), "sockets": add("4")}, 4: {}, 5: {"flows": add("6"), "affinities": add("6")},
	})
	path, err := steps(3, 6)
	must.Do(t, err)
	for name, want := range map[string]string{"flows": "46", "sockets": "4", "affinities": "6", "backends": ""} {
		e, keep, err := walk(path[name], Entry{[]byte("key"), nil})
		if got := fmt.Sprint(string(e.value), keep, err); got != fmt.Sprint(want, true, nil) {
			t.Errorf("%s became %s, want %s", name, got, want)
		}
	}
	if _, keep, _ := walk(path["flows"], Entry{nil, []byte("drop")}); keep {
		t.Error("an entry that a step leaves behind went on")
	}
	if _, err := steps(2, 6); err == nil || !strings.Contains(err.Error(), "from version 2 to 3") {
		t.Errorf("a missing step: %v", err)
	}
	if path, err := steps(6, 6); err != nil || len(path) > 0 {
		t.Errorf("no step to go: %v, %v", path, err)
	}
}

// FuzzConvert takes entries of an older layout through a step of a migration. One of
// another size is refused, and none reaches beyond its own bytes.
func FuzzConvert(f *testing.F) {
	f.Add(make([]byte, 4), make([]byte, 8))
	f.Add([]byte{}, []byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 4), bytes.Repeat([]byte{0xff}, 9))
	step := Entries(func(k uint32, v uint64) (uint64, uint32, bool) { return uint64(k), uint32(v), v != 0 })
	f.Fuzz(func(t *testing.T, key, value []byte) {
		e, keep, err := walk([]convert{step}, Entry{key, value})
		if fits := len(key) == 4 && len(value) == 8; fits != (err == nil) {
			t.Fatalf("sizes %d and %d: %v", len(key), len(value), err)
		}
		if err == nil && keep && (len(e.key) != 8 || len(e.value) != 4 || !bytes.Equal(e.value, value[:4])) {
			t.Errorf("%x, %x becomes %x, %x", key, value, e.key, e.value)
		}
	})
}
