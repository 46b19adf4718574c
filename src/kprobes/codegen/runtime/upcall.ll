; Generated from upcall.c by `make runtime`.
; d43353437fd0c071b57819b0e4915d3134d3ca1d01a4ac607ef7aca1ffd98d3a
define dso_local void @upcall(ptr %frame) #0 {
entry:
  %0 = load i64, ptr @flags_at, align 8
  %1 = getelementptr i64, ptr %frame, i64 %0
  %arrayidx = getelementptr i8, ptr %1, i64 8
  %2 = load i64, ptr %arrayidx, align 8
  %call = call i1 @guard_enter()
  %conv = zext i1 %call to i64
  %expval = call i64 @llvm.expect.i64(i64 %conv, i64 1)
  %tobool.not = icmp eq i64 %expval, 0
  br i1 %tobool.not, label %if.else, label %if.then
if.then:
  %call.i = call i64 @context_number()
  %3 = load ptr, ptr @present, align 8
  %4 = load volatile i64, ptr %3, align 8
  %cmp.i = icmp eq i64 %call.i, 3
  %tobool.i.not = icmp eq i64 %4, 0
  %or.cond = select i1 %cmp.i, i1 true, i1 %tobool.i.not
  br i1 %or.cond, label %lor.end.i, label %lor.rhs.i
lor.rhs.i:
  %5 = load ptr, ptr @absent, align 8
  %6 = load volatile i64, ptr %5, align 8
  %cmp1.i = icmp eq i64 %4, %6
  br label %lor.end.i
lor.end.i:
  %7 = phi i1 [ %cmp1.i, %lor.rhs.i ], [ true, %if.then ]
  %conv.i = zext i1 %7 to i64
  %expval.i = call i64 @llvm.expect.i64(i64 %conv.i, i64 0)
  %tobool3.i.not = icmp eq i64 %expval.i, 0
  br i1 %tobool3.i.not, label %if.end.i, label %if.then3
if.end.i:
  %call4.i = call i64 @cpu()
  %mul.i = shl i64 %call4.i, 2
  %add.i = add i64 %mul.i, %call.i
  %8 = load ptr, ptr @asked, align 8
  %arrayidx.i = getelementptr inbounds i64, ptr %8, i64 %add.i
  %9 = load volatile i64, ptr %arrayidx.i, align 8
  %add6.i = add i64 %9, 1
  %10 = load ptr, ptr @requests, align 8
  %11 = load i64, ptr @room, align 8
  %mul8.i = mul i64 %add.i, %11
  %add.ptr.i = getelementptr inbounds i8, ptr %10, i64 %mul8.i
  %12 = load ptr, ptr @answers, align 8
  %mul10.i = mul i64 %add.i, %11
  %add.ptr11.i = getelementptr inbounds i8, ptr %12, i64 %mul10.i
  %13 = load i64, ptr @flags_at, align 8
  %14 = getelementptr i64, ptr %frame, i64 %13
  %arrayidx.i12 = getelementptr i8, ptr %14, i64 8
  %15 = load i64, ptr %arrayidx.i12, align 8
  %incdec.ptr.i = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 8
  store i64 %15, ptr %add.ptr.i, align 8
  %call.i13 = call i64 @current_task()
  %incdec.ptr1.i = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 16
  store i64 %call.i13, ptr %incdec.ptr.i, align 8
  %call2.i = call i64 @page_table()
  %incdec.ptr3.i = getelementptr inbounds nuw i8, ptr %add.ptr.i, i64 24
  store i64 %call2.i, ptr %incdec.ptr1.i, align 8
  br label %for.cond.i
for.cond.i:
  %n.i.0 = phi i64 [ 0, %if.end.i ], [ %inc.i, %for.body.i ]
  %word.i.0 = phi ptr [ %incdec.ptr3.i, %if.end.i ], [ %incdec.ptr5.i, %for.body.i ]
  %16 = load i64, ptr @flags_at, align 8
  %cmp.i14 = icmp ult i64 %n.i.0, %16
  br i1 %cmp.i14, label %for.body.i, label %put_request.exit
for.body.i:
  %arrayidx4.i = getelementptr inbounds i64, ptr %frame, i64 %n.i.0
  %17 = load i64, ptr %arrayidx4.i, align 8
  %incdec.ptr5.i = getelementptr inbounds nuw i8, ptr %word.i.0, i64 8
  store i64 %17, ptr %word.i.0, align 8
  %inc.i = add i64 %n.i.0, 1
  br label %for.cond.i
put_request.exit:
  %18 = load i64, ptr @flags_at, align 8
  %arrayidx6.i = getelementptr inbounds i64, ptr %frame, i64 %18
  %19 = load i64, ptr %arrayidx6.i, align 8
  %call7.i = call i64 @other_flags()
  %or.i = or i64 %19, %call7.i
  %incdec.ptr8.i = getelementptr inbounds nuw i8, ptr %word.i.0, i64 8
  store i64 %or.i, ptr %word.i.0, align 8
  %20 = load i64, ptr @flags_at, align 8
  %21 = getelementptr i64, ptr %frame, i64 %20
  %arrayidx10.i = getelementptr i8, ptr %21, i64 16
  %22 = load i64, ptr %arrayidx10.i, align 8
  %incdec.ptr11.i = getelementptr inbounds nuw i8, ptr %word.i.0, i64 16
  store i64 %22, ptr %incdec.ptr8.i, align 8
  %add.ptr.i54 = getelementptr inbounds i64, ptr %frame, i64 %20
  %add.ptr1.i55 = getelementptr inbounds nuw i8, ptr %add.ptr.i54, i64 24
  %23 = ptrtoint ptr %add.ptr1.i55 to i64
  store i64 %23, ptr %incdec.ptr11.i, align 8
  %24 = load ptr, ptr @asked, align 8
  %arrayidx14.i = getelementptr inbounds i64, ptr %24, i64 %add.i
  store atomic i64 %add6.i, ptr %arrayidx14.i release, align 8
  %25 = load ptr, ptr @ticks, align 8
  %arrayidx.i20 = getelementptr inbounds i64, ptr %25, i64 %2
  %26 = load volatile i64, ptr %arrayidx.i20, align 8
  %call.i21 = call i64 @counter()
  br label %while.cond.i
while.cond.i:
  %27 = load ptr, ptr @answered, align 8
  %arrayidx1.i22 = getelementptr inbounds i64, ptr %27, i64 %add.i
  %28 = load atomic volatile i64, ptr %arrayidx1.i22 acquire, align 8
  %cmp.i24.not = icmp eq i64 %28, %add6.i
  br i1 %cmp.i24.not, label %if.end17.i, label %while.body.i
while.body.i:
  %29 = load ptr, ptr @present, align 8
  %30 = load volatile i64, ptr %29, align 8
  %tobool.i25.not = icmp eq i64 %30, 0
  %conv.i28 = zext i1 %tobool.i25.not to i64
  %expval.i29 = call i64 @llvm.expect.i64(i64 %conv.i28, i64 0)
  %tobool4.i.not = icmp eq i64 %expval.i29, 0
  br i1 %tobool4.i.not, label %if.end.i30, label %wait_for_answer.exit
if.end.i30:
  call void @pause()
  %call5.i = call i64 @counter()
  %sub.i = sub i64 %call5.i, %call.i21
  %cmp6.i = icmp ugt i64 %sub.i, %26
  %conv12.i = zext i1 %cmp6.i to i64
  %expval13.i = call i64 @llvm.expect.i64(i64 %conv12.i, i64 0)
  %tobool14.i.not = icmp eq i64 %expval13.i, 0
  br i1 %tobool14.i.not, label %while.cond.i, label %if.then15.i
if.then15.i:
  %31 = load ptr, ptr @absent, align 8
  store volatile i64 %4, ptr %31, align 8
  br label %wait_for_answer.exit
wait_for_answer.exit:
  br i1 %cmp.i24.not, label %if.end17.i, label %if.then13.i
if.then13.i:
  %32 = load ptr, ptr @gave_up, align 8
  %arrayidx15.i = getelementptr inbounds i64, ptr %32, i64 %add.i
  store atomic i64 %add6.i, ptr %arrayidx15.i release, align 8
  br label %if.then3
if.end17.i:
  %33 = load i64, ptr @flags_at, align 8
  %arrayidx.i36 = getelementptr inbounds i64, ptr %add.ptr11.i, i64 %33
  %34 = load volatile i64, ptr %arrayidx.i36, align 8
  %35 = getelementptr i64, ptr %add.ptr11.i, i64 %33
  %arrayidx2.i = getelementptr i8, ptr %35, i64 8
  %36 = load volatile i64, ptr %arrayidx2.i, align 8
  %37 = getelementptr i64, ptr %add.ptr11.i, i64 %33
  %arrayidx4.i38 = getelementptr i8, ptr %37, i64 16
  %38 = load volatile i64, ptr %arrayidx4.i38, align 8
  br label %for.cond.i39
for.cond.i39:
  %n.i35.0 = phi i64 [ 0, %if.end17.i ], [ %inc.i50, %for.body.i48 ]
  %39 = load i64, ptr @flags_at, align 8
  %cmp.i40 = icmp ult i64 %n.i35.0, %39
  br i1 %cmp.i40, label %for.body.i48, label %for.end.i
for.body.i48:
  %arrayidx5.i = getelementptr inbounds i64, ptr %add.ptr11.i, i64 %n.i35.0
  %40 = load volatile i64, ptr %arrayidx5.i, align 8
  %arrayidx6.i49 = getelementptr inbounds i64, ptr %frame, i64 %n.i35.0
  store i64 %40, ptr %arrayidx6.i49, align 8
  %inc.i50 = add i64 %n.i35.0, 1
  br label %for.cond.i39
for.end.i:
  %41 = load i64, ptr @pops, align 8
  %tobool.i41.not = icmp eq i64 %41, 0
  br i1 %tobool.i41.not, label %if.end.i42, label %if.then.i47
if.then.i47:
  %42 = inttoptr i64 %38 to ptr
  %arrayidx7.i = getelementptr inbounds i8, ptr %42, i64 -8
  store i64 %36, ptr %arrayidx7.i, align 8
  %43 = inttoptr i64 %38 to ptr
  %arrayidx.i60 = getelementptr inbounds i8, ptr %43, i64 -16
  store i64 %34, ptr %arrayidx.i60, align 8
  %add.ptr.i61 = getelementptr inbounds i8, ptr %43, i64 -16
  %44 = ptrtoint ptr %add.ptr.i61 to i64
  %45 = load i64, ptr @flags_at, align 8
  %arrayidx1.i62 = getelementptr inbounds i64, ptr %frame, i64 %45
  store i64 %44, ptr %arrayidx1.i62, align 8
  br label %if.then5.critedge
if.end.i42:
  %46 = load i64, ptr @flags_at, align 8
  %arrayidx8.i = getelementptr inbounds i64, ptr %frame, i64 %46
  store i64 %34, ptr %arrayidx8.i, align 8
  %47 = getelementptr i64, ptr %frame, i64 %46
  %arrayidx10.i44 = getelementptr i8, ptr %47, i64 16
  %48 = load i64, ptr %arrayidx10.i44, align 8
  %cmp11.i = icmp eq i64 %36, %48
  br i1 %cmp11.i, label %land.lhs.true.i, label %cond.false.i
land.lhs.true.i:
  %49 = load i64, ptr @flags_at, align 8
  %add.ptr.i52 = getelementptr inbounds i64, ptr %frame, i64 %49
  %add.ptr1.i = getelementptr inbounds nuw i8, ptr %add.ptr.i52, i64 24
  %50 = ptrtoint ptr %add.ptr1.i to i64
  %cmp12.i = icmp eq i64 %38, %50
  br i1 %cmp12.i, label %cond.end.i, label %cond.false.i
cond.false.i:
  br label %cond.end.i
cond.end.i:
  %cond.i = phi i64 [ %38, %cond.false.i ], [ 0, %land.lhs.true.i ]
  %51 = load i64, ptr @flags_at, align 8
  %52 = getelementptr i64, ptr %frame, i64 %51
  %arrayidx14.i45 = getelementptr i8, ptr %52, i64 8
  store i64 %cond.i, ptr %arrayidx14.i45, align 8
  %53 = getelementptr i64, ptr %frame, i64 %51
  %arrayidx16.i = getelementptr i8, ptr %53, i64 16
  store i64 %36, ptr %arrayidx16.i, align 8
  br label %if.then5.critedge
if.then3:
  %54 = load ptr, ptr @missed, align 8
  %add.ptr = getelementptr inbounds i64, ptr %54, i64 %2
  %55 = ptrtoint ptr %add.ptr to i64
  call void @count(i64 %55)
  call void @guard_leave()
  br label %if.end8
if.then5.critedge:
  call void @guard_leave()
  br label %return
if.else:
  %56 = load ptr, ptr @missed, align 8
  %add.ptr7 = getelementptr inbounds i64, ptr %56, i64 %2
  %57 = ptrtoint ptr %add.ptr7 to i64
  call void @count(i64 %57)
  br label %if.end8
if.end8:
  %58 = load i64, ptr @pops, align 8
  %tobool.i2.not = icmp eq i64 %58, 0
  br i1 %tobool.i2.not, label %if.else.i, label %if.then.i5
if.then.i5:
  %59 = load i64, ptr @flags_at, align 8
  %arrayidx.i6 = getelementptr inbounds i64, ptr %frame, i64 %59
  %60 = load i64, ptr %arrayidx.i6, align 8
  %add.ptr.i57 = getelementptr inbounds i64, ptr %frame, i64 %59
  %arrayidx.i66 = getelementptr inbounds nuw i8, ptr %add.ptr.i57, i64 8
  store i64 %60, ptr %arrayidx.i66, align 8
  %add.ptr.i67 = getelementptr inbounds nuw i8, ptr %add.ptr.i57, i64 8
  %61 = ptrtoint ptr %add.ptr.i67 to i64
  %62 = load i64, ptr @flags_at, align 8
  %arrayidx1.i68 = getelementptr inbounds i64, ptr %frame, i64 %62
  store i64 %61, ptr %arrayidx1.i68, align 8
  br label %return
if.else.i:
  %63 = load i64, ptr @flags_at, align 8
  %64 = getelementptr i64, ptr %frame, i64 %63
  %arrayidx1.i = getelementptr i8, ptr %64, i64 8
  store i64 0, ptr %arrayidx1.i, align 8
  br label %return
return:
  ret void
}
