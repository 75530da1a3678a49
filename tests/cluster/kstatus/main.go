// It reads Kubernetes objects in JSON, one per line, and prints the status that kstatus computes for each, one per line.
package main

import (
	"bufio"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
)

const longestLine = 16 << 20

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestLine)
	for lines.Scan() {
		var object unstructured.Unstructured
		if err := object.UnmarshalJSON(lines.Bytes()); err != nil {
			fail(err)
		}
		result, err := status.Compute(&object)
		if err != nil {
			fail(err)
		}
		fmt.Println(result.Status)
	}
	if err := lines.Err(); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "kstatus:", err)
	os.Exit(1)
}
