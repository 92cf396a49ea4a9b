package iptables

import (
	"strings"
	"testing"
)

func TestWhatSomebodyElseChangedIsNamed(t *testing.T) {
	eachVariant(t, func(b *bench) {
		for _, test := range []struct {
			name string
			does []string
			want string
		}{
			{"a chain is emptied", []string{"iptables -t nat -F SPW-ADDRESSES"}, "IPv4 table nat: chain SPW-ADDRESSES emptied"},
			{"a rule goes", []string{"iptables -D SPW-REFUSE 1"}, "IPv4 table filter: chain SPW-REFUSE changed"},
			{"a chain comes", []string{"ip6tables -t nat -N SPW-NEW"}, "IPv6 table nat: chain SPW-NEW added"},
			{"a chain goes", []string{"iptables -D FORWARD 2", "iptables -F SPW-FORWARD", "iptables -X SPW-FORWARD"},
				"IPv4 table filter: chain SPW-FORWARD removed, jump from FORWARD changed"},
			{"ways in go", []string{"iptables -t nat -F PREROUTING", "iptables -t nat -F OUTPUT"},
				"IPv4 table nat: jump from PREROUTING, OUTPUT changed"},
			{"nothing", nil, ""},
		} {
			be, one, two := b.open(), service(1), service(2)
			b.replace(be, one, two)
			b.mustRun(test.does...)
			b.replace(be, one, two)
			if got := be.Repaired(); got.Found != test.want || got.Any() != (test.want != "") {
				b.t.Errorf("%s: repaired is %+v, want %q", test.name, got, test.want)
			}
			b.inSync(be)
		}
	})
}

func TestOnlySomeChainsAreNamed(t *testing.T) {
	if got := listFirst([]string{"a", "b", "c", "d", "e", "f", "g"}); got != "a, b, c, d, e and 2 more" {
		t.Error(got)
	}
}

func TestDifferencesOfAPort(t *testing.T) {
	eachVariant(t, func(b *bench) {
		for _, test := range []struct {
			name string
			does string
			want string
		}{
			{"nothing", "", ""},
			{"the chain of another Service", "iptables -t nat -F OTHER", ""},
			{"the chain of the Service", "iptables -t nat -F CHAIN", "IPv4 table nat: chain CHAIN emptied"},
			{"a chain that leads there", "iptables -t nat -F SPW-ADDRESSES", "IPv4 table nat: chain SPW-ADDRESSES emptied"},
			{"the way in", "iptables -t nat -F OUTPUT", "IPv4 table nat: jump from OUTPUT changed"},
		} {
			be, one, two := b.open(), service(1), service(2)
			b.replace(be, one, two)
			named := strings.NewReplacer("CHAIN", b.chainOf(be, one), "OTHER", b.chainOf(be, two)).Replace
			if test.does != "" {
				b.mustRun(named(test.does))
			}
			found, err := be.Differences(b.t.Context(), one.ID, 20)
			if err != nil {
				b.t.Fatal(err)
			}
			if got := strings.Join(found, "\n"); got != named(test.want) {
				b.t.Errorf("%s: %q, want %q", test.name, got, test.want)
			}
			b.replace(be, one, two)
		}
	})
}
