package cli

import (
	"os"

	"github.com/spf13/pflag"
)

// Pins is the flag --bpffs of commands that read an agent's pins.
type Pins struct {
	dir  string
	flag *pflag.Flag
}

// pinDirs are where the pins of a node's agent are: on the node and in the agent's
// container, and in a container of "kubectl debug node/NODE".
var pinDirs = []string{"/sys/fs/bpf/spillway", "/host/sys/fs/bpf/spillway"}

// AddFlag adds the flag. use is its description.
func (p *Pins) AddFlag(f *pflag.FlagSet, use string) {
	f.StringVar(&p.dir, "bpffs", pinDirs[0], use+" Without the flag, also below /host, as in containers of 'kubectl debug node'.")
	p.flag = f.Lookup("bpffs")
}

// Dir returns the directory of the pins: the flag's value, or the first place that exists.
func (p *Pins) Dir() string {
	if p.flag.Changed {
		return p.dir
	}
	for _, dir := range pinDirs {
		if _, err := os.Stat(dir); err == nil {
			return dir
		}
	}
	return p.dir
}
