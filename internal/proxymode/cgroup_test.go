package proxymode

import "testing"

func TestTheMachinesSocketsAreServedOnlyFromItsOwnNetwork(t *testing.T) {
	for _, test := range []struct {
		own, pid1 string
		may       bool
	}{
		{"net:[1]", "net:[1]", true},
		{"net:[2]", "net:[1]", false},
		{"net:[2]", "", false}, // pid 1 cannot be seen
		{firstNetns, "", true},
		{"", "net:[1]", false},
		{"", "", false},
	} {
		if err := mayDefaultCgroup(test.own, test.pid1); (err == nil) != test.may {
			t.Errorf("agent in %q, pid 1 in %q: error %v", test.own, test.pid1, err)
		}
	}
}
