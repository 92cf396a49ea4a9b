package kernel

import "os"

// NetnsName names the network namespace of a process, such as "net:[4026531833]".
// proc is the process's directory in /proc. The name is "" if it cannot be read.
func NetnsName(proc string) string {
	name, _ := os.Readlink(proc + "/ns/net")
	return name
}
