// Marks steps of a job, as a training program would, without its numbers: 20 a second, until it is ended.
//
//	mark SOCKET JOB RANK
package main

import (
	"fmt"
	"net"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: mark SOCKET JOB RANK")
		os.Exit(2)
	}
	for step := 0; ; step++ {
		if err := mark(os.Args[1], os.Args[2], os.Args[3], step); err != nil {
			fmt.Fprintln(os.Stderr, err)
			time.Sleep(time.Second)
		}
	}
}

// The daemon may have made the socket anew since the step before.
func mark(socket, job, rank string, step int) error {
	daemon, err := net.Dial("unixgram", socket)
	if err != nil {
		return err
	}
	defer daemon.Close()
	for _, event := range []string{"begin", "end"} {
		text := fmt.Sprintf(`{"event":%q,"name":"step","kind":"step","step":%d,"job":%q,"rank":%s}`, event, step, job, rank)
		if _, err := daemon.Write([]byte(text)); err != nil {
			return err
		}
		time.Sleep(25 * time.Millisecond)
	}
	return nil
}
