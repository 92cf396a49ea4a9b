package drops

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
)

// symbols are the kernel's functions by address.
type symbols struct {
	at    []uint64
	names []string
}

var errHidden = errors.New("the kernel hides addresses (kernel.kptr_restrict)")

func readSymbols() (*symbols, error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, fmt.Errorf("read names of kernel functions: %w", err)
	}
	defer f.Close()
	return parseSymbols(f)
}

// parseSymbols reads lines such as "ffffffff81f2af50 t nf_hook_slow [module]".
func parseSymbols(r io.Reader) (*symbols, error) {
	type symbol struct {
		at   uint64
		name string
	}
	var list []symbol
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		field := bytes.Fields(lines.Bytes())
		if len(field) < 3 || len(field[1]) != 1 || !bytes.ContainsAny(field[1], "tTwW") {
			continue
		}
		at, err := strconv.ParseUint(string(field[0]), 16, 64)
		if err != nil || at == 0 {
			continue
		}
		name := string(field[2])
		if len(field) > 3 {
			name += " " + string(field[3])
		}
		list = append(list, symbol{at, name})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read names of kernel functions: %w", err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("read names of kernel functions: %w", errHidden)
	}
	slices.SortStableFunc(list, func(a, b symbol) int {
		if a.at < b.at {
			return -1
		}
		return min(1, int(a.at-b.at))
	})
	s := &symbols{}
	for _, l := range list {
		s.at, s.names = append(s.at, l.at), append(s.names, l.name)
	}
	return s, nil
}

// function returns the name of the function at an address, and the offset in it. It
// returns the address if no function contains it.
func (s *symbols) function(at uint64) string {
	if at == 0 {
		return ""
	}
	if s != nil {
		i, exact := slices.BinarySearch(s.at, at)
		if !exact {
			i--
		}
		// No function is a megabyte long: beyond the last symbol is other code.
		if i >= 0 && at-s.at[i] < 1<<20 {
			return fmt.Sprintf("%s+%#x", s.names[i], at-s.at[i])
		}
	}
	return fmt.Sprintf("%#x", at)
}
