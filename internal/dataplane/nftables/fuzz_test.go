package nftables

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// FuzzParsePort reads comments of elements. A port that is read has the same name again.
func FuzzParsePort(f *testing.F) {
	for _, s := range []string{"default/web http 80/TCP clusterIP", "default/web 80/UDP nodePort", "web 80/TCP clusterIP",
		"a/b 99999/TCP clusterIP", "a/b -1/TCP clusterIP", "a/ 1/TCP clusterIP", "", "a/b 1/TCP x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, comment string) {
		id, kind, ok := parsePort(comment, model.IPv6)
		if !ok {
			return
		}
		if id.Service.Name == "" {
			t.Errorf("%q is %v", comment, id)
		}
		text := describePort(id, kind)
		again, kind2, ok := parsePort(text, model.IPv6)
		if !ok || again != id || kind2 != kind || strings.Count(text, "\n") > 0 {
			t.Errorf("%q is %v, written as %q, which is %v", comment, id, text, again)
		}
	})
}
