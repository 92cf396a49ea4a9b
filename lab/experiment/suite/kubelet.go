package suite

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// RefuseKubelet returns an error if a kubelet runs on this machine: experiments
// saturate it, and some change values that its pods live by.
func RefuseKubelet() error { return refuseKubelet("/proc") }

func refuseKubelet(proc string) error {
	comms, err := filepath.Glob(proc + "/[0-9]*/comm")
	if err != nil {
		return err
	}
	for _, path := range comms {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		switch name := strings.TrimSpace(string(text)); name {
		// k3s and others contain the kubelet in a process of their own name.
		case "kubelet", "k3s", "k3s-server", "k3s-agent", "rke2", "k0s", "kubelite":
			return fmt.Errorf("run experiments: %s runs here (process %s): this is a node of a cluster, which experiments load "+
				"to its limit and whose conntrack sizes some of them change: use another machine, or --yes-on-this-node",
				name, filepath.Base(filepath.Dir(path)))
		}
	}
	return nil
}
